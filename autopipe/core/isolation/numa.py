"""NUMA: keep a stage's memory on the node whose cores read it. By the kernel's own call; no libnuma needed."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from autopipe.core.affinity import allowed_cores

_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""System call numbers (Linux: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h)."""
_MPOL_BIND = 2
_MASK_BITS = 1024


def numa_nodes(root: Path = _NODES) -> dict[int, tuple[int, ...]]:
    """NUMA nodes with memory or cores: number -> cores. Empty where the system has no such notion."""
    nodes = {}
    for folder in root.glob("node[0-9]*"):
        try:
            nodes[int(folder.name[4:])] = parse_cpu_list((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
    return dict(sorted(nodes.items()))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`0-3,8` as numbers.

    Raises:
        ValueError: not such a list.
    """
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def bind_memory(node: int) -> str | None:
    """Take this thread's memory, and that of threads it starts, from `node` from now on.

    Returns:
        None, or in words why it was not done.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    nodes = numa_nodes()
    if not nodes or number is None:
        return f"memory not bound to NUMA node {node}: this system has no NUMA nodes"
    if node not in nodes:
        return f"memory not bound to NUMA node {node}: there are nodes {', '.join(map(str, nodes))}"
    words = _MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))
    mask = (ctypes.c_ulong * words)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << (node % bits)
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, _MPOL_BIND, mask, ctypes.c_ulong(_MASK_BITS)) != 0:
        return f"memory not bound to NUMA node {node}: {os.strerror(ctypes.get_errno())}"
    return None


def cores_of(node: int) -> tuple[int, ...] | None:
    """The node's cores that this process may use; None: it has none, or the system does not say."""
    cores = numa_nodes().get(node, ())
    allowed = allowed_cores()
    return (cores if allowed is None else tuple(sorted(allowed.intersection(cores)))) or None
