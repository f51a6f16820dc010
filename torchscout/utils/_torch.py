"""Every private name of PyTorch that torchscout uses, each under one public name.

Other modules import these names from here only (``tests/test_architecture.py``). A name that this PyTorch
does not have is None, so that imports succeed and ``enable_resiliency`` can report it: see ``missing_names``.
The private attributes of FSDP2 and of context parallelism are checked where they are used:
``replay/fsdp_state.py`` and ``replay/capture/context.py``.
"""

from __future__ import annotations

import pkgutil
import sys
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["compiler", "inner_of", "local_of", "missing_names"]

_REQUIRED = {
    "AsyncCollectiveTensor": "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "DispatchKey": "torch._C.DispatchKey",
    "OpOverload": "torch._ops.OpOverload",
    "StridedShard": "torch.distributed.tensor.placement_types._StridedShard",
    "TreeSpec": "torch.utils._pytree.TreeSpec",
    "assert_async": "torch._assert_async",
    "backend_of": "torch.distributed.ProcessGroup._get_backend",
    "default_store": "torch.distributed.distributed_c10d._get_default_store",
    "current_graph_task_id": "torch._C._current_graph_task_id",
    "describe_group": "torch.distributed.ProcessGroup._set_group_desc",
    "name_group": "torch.distributed.ProcessGroup._set_group_name",
    "operator_names": "torch._C._dispatch_get_all_op_names",
    "plain_attention": "torch._C._nn.scaled_dot_product_attention",
    "register_backend": "torch.distributed.ProcessGroup._register_backend",
    "set_backend": "torch.distributed.ProcessGroup._set_default_backend",
    "set_deterministic": "torch._C._set_deterministic_algorithms",
    "tree_flatten": "torch.utils._pytree.tree_flatten",
    "tree_leaves": "torch.utils._pytree.tree_leaves",
    "tree_map": "torch.utils._pytree.tree_map",
    "tree_unflatten": "torch.utils._pytree.tree_unflatten",
    "treespec_dumps": "torch.utils._pytree.treespec_dumps",
    "treespec_loads": "torch.utils._pytree.treespec_loads",
}
_REQUIRED_ON_CUDA = {"current_raw_stream": "torch._C._cuda_getCurrentRawStream"}
_OPTIONAL = {
    # Present in some builds or releases only; the code that uses them checks for None.
    "RendezvousAction": "torch.distributed.elastic.rendezvous.dynamic_rendezvous._Action",
    "RendezvousJoin": "torch.distributed.elastic.rendezvous.dynamic_rendezvous._RendezvousJoinOp",
    "DataLoaderIterator": "torch.utils.data.dataloader._BaseDataLoaderIter",
    "dump_flight_recorder": "torch._C._distributed_c10d._dump_fr_trace_json",
    "dump_nccl_flight_recorder": "torch._C._distributed_c10d._dump_nccl_trace_json",
    "frame_evaluation": "torch._C._dynamo.eval_frame",
    "scaled_mm": "torch._scaled_mm",
    # For deliberate faults and test models only.
    "DispatchKeySet": "torch._C.DispatchKeySet",
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "all_to_all_single_autograd": "torch.distributed._functional_collectives.all_to_all_single_autograd",
    "create_work_from_future": "torch._C._distributed_c10d._create_work_from_future",
    "cuda_sleep": "torch.cuda._sleep",
    "tree_map_only": "torch.utils._pytree.tree_map_only",
}

if TYPE_CHECKING:  # all other names are Any
    from torch.distributed import _functional_collectives
    from torch.distributed.tensor import placement_types
    from torch.utils import _python_dispatch, _pytree

    AsyncCollectiveTensor = _functional_collectives.AsyncCollectiveTensor
    DispatchKey = torch._C.DispatchKey
    OpOverload = torch._ops.OpOverload[..., Any]
    StridedShard = placement_types._StridedShard
    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    TreeSpec = _pytree.TreeSpec


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: some come with modules that take long to import."""
    if path := {**_REQUIRED, **_REQUIRED_ON_CUDA, **_OPTIONAL}.get(name):
        return _find(path)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def missing_names() -> list[str]:
    """Return the private names that torchscout needs and this PyTorch does not have, by their full path."""
    on_cuda = _REQUIRED_ON_CUDA if torch.version.cuda or torch.version.hip else {}
    return [path for path in (*_REQUIRED.values(), *on_cuda.values()) if _find(path) is None]


def compiler() -> Any:
    """Return ``torch._dynamo`` if it has been imported, otherwise None. Importing it takes seconds."""
    return sys.modules.get("torch._dynamo")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing memory: of a DTensor the local tensor, else the tensor.

    Unlike ``DTensor.to_local()`` it takes no part in autograd, and no time.
    """
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def inner_of(optimizer: Any) -> Any:
    """Return the optimizer that a ``ZeroRedundancyOptimizer`` wraps; None for any other optimizer.

    Its module compiles TorchScript when it is imported, which takes as long as all of torchscout does. A
    program that has such an optimizer has imported it.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    is_wrapper = module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
    return optimizer.optim if is_wrapper else None


def _find(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None
