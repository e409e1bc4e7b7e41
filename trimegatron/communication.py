"""Every message a rank sends or takes part in, by kind and mesh axis, as torch.distributed issues it."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimegatron.mesh import Mesh

KINDS = {
    "allreduce_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}
"""torch's operator → what we call it; others keep their names."""


AXES = ("world", "pipeline", "data", "tensor", "embedding")
"""Of the mesh."""


class Message(NamedTuple):
    """One collective, or one half of a point-to-point message, as one rank sees it."""

    kind: str
    axis: str
    """Of the mesh: "tensor", "data", …; "other" where the group is none of them."""
    num_bytes: int
    """Of the whole tensor: what an all-gather makes, what a reduce-scatter takes."""

    def sent(self, group_size: int) -> float:
        """Bytes this rank sends where the ring algorithm runs, n ranks: all-reduce 2(n-1)/n of the whole, all-gather
        and reduce-scatter (n-1)/n, broadcast and send all of it."""
        n = group_size
        factors = {"all-reduce": 2 * (n - 1) / n, "all-gather": (n - 1) / n, "reduce-scatter": (n - 1) / n}
        return self.num_bytes * (factors | {"receive": 0.0}).get(self.kind, 1.0)


class CommunicationRecorder(TorchDispatchMode):
    """While entered, counts the messages of this rank, in backward passes too.

    It sees torch's own operators, so that what torch's pipelining sends by itself is in it. All goes on as without it.
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.messages: Counter[Message] = Counter()
        self.axes = {axis.group.group_name: name for name in AXES if (axis := getattr(mesh, name)).group is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: tuple[Any, ...]) -> None:
        at = [argument.name for argument in func._schema.arguments].index("process_group")
        group = torch.distributed.ProcessGroup.unbox(args[at])
        name = func._schema.name.removeprefix("c10d::")
        # The first argument is what comes out, the second of some what goes in; the larger is the whole.
        sizes = [sum(x.nbytes for x in tree_leaves(arg) if isinstance(x, torch.Tensor)) for arg in args[:2]]
        axis = self.axes.get(group.group_name, "other")
        self.messages[Message(KINDS.get(name, name), axis, 0 if name == "barrier" else max(sizes))] += 1
