"""Launches of a compiled kernel without Triton's dispatch, which costs more host time than many kernels run.

Triton binds, specialises and hashes every argument of every call in Python. Here the first launch of a kind goes that
way; what it compiled is kept under a key that is cheaper to make, and later launches call its launcher at once. The
key holds all that Triton specialises on: dtype and 16-byte alignment of each tensor, the value of each integer (of one
in ``do_not_specialize`` only whether it fits into 32 bits), which arguments are None, and the constants.

Only ``CompiledKernel.run``, ``function`` and ``packed_metadata`` of Triton are used, and the order of ``run``'s
arguments; they are the same in 3.6 to 3.9. Where they are not found, on an AMD GPU, and while a profiler's launch hooks
are set, launches take the ordinary way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

_MOST_KINDS = 4096  # of one kernel; training has a few dozen, text generation one for every length

_ONES = ((), (1, 1), (1,), ())  # what a grid of so many dimensions lacks to three

_log = logging.getLogger(__name__)
_reasons_given: set[str] = set()


class _Prepared(NamedTuple):
    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]  # in the order of the kernel's parameters, which they end
    compiled: Any  # unloads the function when it goes


def _say_once(reason: str) -> None:
    if reason not in _reasons_given:
        _reasons_given.add(reason)
        _log.warning("kernels are launched through Triton's dispatch (some 10 µs more a launch): %s", reason)


def _key_maker(
    kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], optional: set[int]
) -> Callable[..., tuple[Any, ...]]:
    """A function (device, warps, stages, *arguments, **constants) that makes the key, written out for this kernel: a
    loop over the arguments would cost more than all the rest of a launch. ``optional`` holds the positions that may be
    None.

    Where every tensor starts on 16 bytes, which is one test, the key says that; else how each does.
    """
    parts, addresses = ["device", "warps", "stages", *constants], []
    for index, value in enumerate(args):
        name = f"a{index}"
        if value is None or isinstance(value, torch.Tensor):
            is_none = f"{name} is None or " if index in optional else ""
            parts.append(f"{is_none}{name}.dtype")
            addresses.append(f"(0 if {name} is None else {name}.data_ptr())" if is_none else f"{name}.data_ptr()")
        elif isinstance(value, float):
            continue
        elif kernel.params[index].do_not_specialize:
            parts.append(f"-0x80000000 <= {name} <= 0x7FFFFFFF")
        else:
            parts.append(name)
    each = ", ".join(f"{address} & 15" for address in addresses)
    parts.append(f"({' | '.join(addresses)}) & 15 and ({each},)")
    names = ", ".join(("device", "warps", "stages", *(f"a{index}" for index in range(len(args))), "*", *constants))
    maker: Callable[..., tuple[Any, ...]] = eval(f"lambda {names}: ({', '.join(parts)},)")
    return maker


class StaticLaunch:
    """Launches of one kernel, whose parameters are tensors and numbers, then constants."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}
        self._optional: set[int] = set()
        self._key: Callable[..., tuple[Any, ...]] = self._learn
        self._stream: Callable[[int], int] | None = None
        self._knobs = triton.knobs.runtime

    def __call__(
        self, device: int, grid: tuple[int, ...], args: tuple[Any, ...], config: Any, constants: dict[str, Any]
    ) -> None:
        """Run on the current stream of GPU number ``device``, whichever is current. ``constants`` are the kernel's last
        parameters, in any order."""
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(device, grid, args, config, constants)
        try:
            key = self._key(device, config.num_warps, config.num_stages, *args, **constants)
        except AttributeError:  # None where so far there was a tensor
            key = self._learn(device, config.num_warps, config.num_stages, *args, **constants)
        prepared = self._prepared.get(key)
        knobs = self._knobs
        if (
            prepared is None
            or getattr(knobs.launch_enter_hook, "calls", True)
            or getattr(knobs.launch_exit_hook, "calls", True)
        ):
            compiled = ordinary_launch(self.kernel, grid, args, config, constants)
            return self._keep(key, compiled, len(args), constants)
        assert self._stream is not None
        return prepared.run(
            *grid, *_ONES[len(grid)], self._stream(device), prepared.function, prepared.metadata, None, None, None,
            *args, *prepared.constants,
        )  # fmt: skip

    def _learn(self, device: int, warps: int, stages: int, *args: Any, **constants: Any) -> tuple[Any, ...]:
        """Make the function that makes keys, and the key of these arguments."""
        self._optional |= {index for index, value in enumerate(args) if value is None}
        self._key = _key_maker(self.kernel, args, constants, self._optional)
        return self._key(device, warps, stages, *args, **constants)

    def _keep(self, key: tuple[Any, ...], compiled: Any, count: int, constants: dict[str, Any]) -> None:
        """Prepare the next launches of the kind that ``compiled`` was made for; ``count`` of its arguments are not
        constants."""
        names = self.kernel.arg_names[count:]
        if sorted(names) != sorted(constants):
            return _say_once(f"the constants of {self.kernel.__name__} are not its last parameters")
        missing = [name for name in ("run", "function", "packed_metadata") if not hasattr(compiled, name)]
        if torch.version.hip is not None:
            return _say_once("only the specialisation for NVIDIA GPUs is known")
        if missing:
            return _say_once(f"Triton {triton.__version__} has no {' and no '.join(missing)} in a compiled kernel")
        if len(self._prepared) >= _MOST_KINDS:
            self._prepared.clear()
        self._stream = triton.runtime.driver.active.get_current_stream
        run = compiled.run  # first: it loads the function
        self._prepared[key] = _Prepared(
            run, compiled.function, compiled.packed_metadata, tuple(constants[name] for name in names), compiled
        )
        return None


def ordinary_launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], config: Any, constants: dict[str, Any]
) -> Any:
    """Through Triton's dispatch, on the current device; the compiled kernel. Contraction of a * b + c is asked for by
    name, since Triton's default for it changes between versions."""
    return kernel[grid](
        *args, num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True, **constants
    )
