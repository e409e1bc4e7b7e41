"""Compiles what the launchers would launch, for GPUs this machine does not have, and reads the machine code.

``record`` runs a launcher on meta tensors with ``launcher.launch`` replaced, so that kernels, constants, tiles and
warps are the ones of a real call; ``measure`` compiles one of them and counts registers, spills and access widths.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trimegatron.bench import pipes
from trimegatron.kernels import launcher
from trimegatron.kernels.launcher import Config


@dataclass(frozen=True)
class Multiprocessor:
    """What the programs on one multiprocessor share: CUDA's "technical specifications per compute capability"."""

    warps: int
    shared_bytes: int
    programs: int = 32
    registers: int = 1 << 16


MULTIPROCESSORS = {80: Multiprocessor(64, 164 << 10), 90: Multiprocessor(64, 228 << 10)}
MULTIPROCESSORS[100] = MULTIPROCESSORS[90]
_SYSTEM_SHARED_BYTES = 1024  # of each program

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.M)
_NARROW_OFFSET = re.compile(r"tt\.addptr .*tensor<\d+x\d+xi32>")
_RESOURCES = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")


@dataclass
class Launch:
    """One call of ``launcher.launch``."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    config: Config
    constexprs: dict[str, Any]


@dataclass
class Code:
    """What a compiled kernel uses; widths in bits -> number of instructions."""

    arch: int
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    loads: Counter[int] = field(default_factory=Counter)
    stores: Counter[int] = field(default_factory=Counter)
    async_loads: Counter[int] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)
    """Instructions by pipe (``pipes.py``), each once."""
    loops: list[Counter[str]] = field(default_factory=list)
    """The same of every innermost loop."""
    narrow_offsets: list[str] = field(default_factory=list)
    """Pointer arithmetic on [R, C] tiles with 32-bit offsets, which overflow at 2**31 elements."""

    @property
    def programs(self) -> int:
        """Programs that fit on a multiprocessor. Warps take registers by 256, and come in fours."""
        has = MULTIPROCESSORS[self.arch]
        warp_registers = -(-self.registers * 32 // 256) * 256
        by_registers = has.registers // warp_registers // 4 * 4 // self.num_warps
        by_shared = has.shared_bytes // (-(-self.shared_bytes // 128) * 128 + _SYSTEM_SHARED_BYTES)
        return min(by_registers, by_shared, has.warps // self.num_warps, has.programs)

    @property
    def occupancy(self) -> float:
        """Share of a multiprocessor's warps that can be there at a time."""
        return self.programs * self.num_warps / MULTIPROCESSORS[self.arch].warps

    @property
    def tile_instructions(self) -> Counter[str]:
        """Instructions by pipe that a thread needs for one tile: those of the loops over tiles, or of a kernel that has
        none. A loop that is known to run once is none to the compiler: look at shapes that make it run."""
        return sum(self.loops, Counter()) if self.loops else self.whole

    @property
    def loaded_bytes(self) -> int:
        """What one program asks for if every load instruction runs once, 128-bit ones only."""
        return (self.loads[128] + self.async_loads[128]) * 16 * 32 * self.num_warps

    @property
    def stored_bytes(self) -> int:
        return self.stores[128] * 16 * 32 * self.num_warps

    @property
    def bytes_in_flight(self) -> int:
        """Of a multiprocessor whose programs have issued every load they can before they wait: those of a straight
        kernel, or all but one stage of a pipelined loop."""
        ahead = self.async_loads[128] * (self.num_stages - 1) // max(1, self.num_stages)
        return (self.loads[128] + ahead) * 16 * 32 * self.num_warps * self.programs

    def __str__(self) -> str:
        def widths(counts: Counter[int]) -> str:
            return "+".join(f"{n}x{bits}" for bits, n in sorted(counts.items(), reverse=True)) or "-"

        return (
            f"{self.registers} registers, {self.spill_bytes} B spilled, {self.shared_bytes} B shared, "
            f"loads {widths(self.loads)}, async {widths(self.async_loads)}, stores {widths(self.stores)}"
        )


def record(call: Callable[[], Any]) -> list[Launch]:
    """The launches ``call`` makes; nothing runs."""
    launches: list[Launch] = []

    def keep(kernel: Any, grid: tuple[int, ...], *args: Any, config: Config, **constexprs: Any) -> None:
        launches.append(Launch(kernel, grid, args, config, constexprs))

    with mock.patch.object(launcher, "launch", keep):
        call()
    return launches


def source(launch: Launch) -> ASTSource:
    """With the argument types and hints the JIT would choose, tensors aligned to 16 bytes: Triton's cache takes what is
    compiled of it and what a launch compiles for the same."""
    fn = launch.kernel
    signature: dict[str, str] = {}
    constants = dict(launch.constexprs)
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    values = iter(launch.args)
    for index, parameter in enumerate(fn.params):
        name = parameter.name
        hints[(index,)] = []
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = next(values)
        specialise = not parameter.do_not_specialize
        if value is None or (specialise and isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            hints[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
            del hints[(index,)]
        else:
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            if not specialise:
                del hints[(index,)]
            elif value % 16 == 0:
                hints[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn, signature=signature, constexprs=constants, attrs=hints)


def _tool(*arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(path), *arguments], check=True, text=True, capture_output=True).stdout


def _width(opcode: str) -> int:
    parts = opcode.split(".")
    for bits in (128, 64):
        if str(bits) in parts:
            return bits
    return 16 if {"U16", "S16"} & set(parts) else 8 if {"U8", "S8"} & set(parts) else 32


def measure(launch: Launch, arch: int) -> Code:
    """Compile for compute capability ``arch`` (80, 90, 100) and read the result."""
    options = {
        "num_warps": launch.config.num_warps,
        "num_stages": launch.config.num_stages,
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source(launch), target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("--dump-resource-usage", str(cubin)).split(f"Function {compiled.metadata.name}:")[-1]
        sass = _tool("-sass", str(cubin))
        opcodes = _OPCODE.findall(sass)
    match = _RESOURCES.search(usage)
    assert match, usage
    registers, stack, static_shared, local = map(int, match.groups())
    config = launch.config
    code = Code(
        arch, config.num_warps, config.num_stages, registers, stack + local, static_shared + compiled.metadata.shared
    )
    code.whole, code.loops = pipes.whole(sass), pipes.loops(sass)
    code.narrow_offsets = _NARROW_OFFSET.findall(compiled.asm["ttir"])
    counters = {"LDG": code.loads, "STG": code.stores, "LDGSTS": code.async_loads}
    for opcode in opcodes:
        head = opcode.partition(".")[0]
        if head in counters:
            counters[head][_width(opcode)] += 1
        if head in ("LDL", "STL"):
            code.spill_bytes += 4
    return code
