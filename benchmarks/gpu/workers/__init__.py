"""Programs that cases start in processes of their own."""
