"""Operations on tensors, without process groups or parameters."""
