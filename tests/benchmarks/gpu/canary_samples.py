"""Rows of a made-up canary: one passes, others fail in every way that a kernel can."""

from __future__ import annotations

import os
import time

import torch

from benchmarks.gpu.canary_compare import NeedsCuda, Row


def lack_cuda(device: torch.device) -> str:
    raise NeedsCuda


def be_wrong(device: torch.device) -> str:
    raise AssertionError("out 1.0e+00;\n allowed 1e-02")


def die(device: torch.device) -> str:
    os._exit(9)


def hang(device: torch.device) -> str:
    time.sleep(60)
    return ""


ROWS = [
    Row("fine", lambda device: f"on {device.type}"),
    Row("lacking", lack_cuda),
    Row("dies", die),
    Row("hangs", hang),
    Row("wrong", be_wrong),
    Row("wrong but recorded", be_wrong, is_judged=False),
]
