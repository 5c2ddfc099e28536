"""The machine that the command line names: a device that is known, or a file, with what the user says of its nodes."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron.errors import ConfigError
from megatron.planner.devices import device
from megatron.planner.machine import Machine


def machine_of(flags: argparse.Namespace) -> Machine:
    """Return the machine that the flags name.

    Raises:
        ConfigError: there is no such device, the file cannot be read, or no memory is left.
    """
    machine = Machine.load(flags.machine) if flags.machine else device(flags.gpu or "h100-80g")
    if flags.gpus_per_node:
        machine = replace(machine, devices_per_node=flags.gpus_per_node)
    if flags.memory:
        machine = replace(machine, memory_bytes=int(flags.memory * 1e9))
    if machine.usable_bytes <= 0:
        raise ConfigError(
            f"--memory must be more than the {machine.reserved_bytes / 1e9:g} GB that the driver and the libraries "
            f"take, got {machine.memory_bytes / 1e9:g}. Use more"
        )
    return machine


def check_nodes(world: int, machine: Machine) -> None:
    """Return if the devices are those of whole nodes, or of a part of one.

    Raises:
        ConfigError: a node would be used in part, beside others.
    """
    node = machine.devices_per_node
    if world > node and world % node:
        raise ConfigError(
            f"--gpus must be a multiple of the devices of a node, {node}, where there are several nodes, got {world}. "
            f"Use {world // node * node} or {(world // node + 1) * node}, or say --gpus-per-node"
        )
