"""PyTorch's ProcessGroup interface for one simulated rank: turns each method into a call of the exchange."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpverify.errors import CollectiveRefused
from tpverify.simulator.collectives import check_reducible
from tpverify.simulator.endpoint import Endpoint, SimWork
from tpverify.simulator.exchange import Call
from tpverify.simulator.plain_tensors import PlainTensors, waited

_ProcessGroup: Any = dist.ProcessGroup  # its stubs describe one release; the methods below serve several


class SimProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives are carried out by the simulator.

    Method names differ between torch releases; ``RELEASE_NAMES`` lists the names of each method, all of them defined.

    Args:
        endpoint: issues collectives, sends and receives for this rank.
        name: the group's name in c10d's registry.
        key: names the group among all that the run ever creates; c10d's names start again after a new init_process_group.
        group_rank: this rank's position in the group.
        members: global ranks of the group, in group order.
    """

    def __init__(self, endpoint: Endpoint, name: str, key: str, group_rank: int, members: tuple[int, ...]) -> None:
        super().__init__(group_rank, len(members))
        self.endpoint = endpoint
        self.key = key
        self._name = name
        self.group_rank = group_rank
        self.members = members
        self._desc = ""
        self._batch: list[SimWork] | None = None

    def getBackendName(self) -> str:
        """The backend's name."""
        return "sim"

    def name(self) -> str:
        """The backend's name."""
        return "sim"

    @property
    def group_name(self) -> str:
        """The group's name in c10d's registry."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the creator called the group."""
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    supports_coalescing = False
    supports_splitting = False

    def _get_backend(self, device: Any) -> SimProcessGroup:
        return self

    def shutdown(self) -> None:
        """Nothing is held."""

    def abort(self) -> None:
        """Nothing is held."""

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """all_reduce in place, of one tensor or several (coalesced)."""
        tensors = _listed(tensors)
        return self._issue(Call("all_reduce", tensors, tensors, reduce_op=_reduce_op(opts), is_async=_is_async(opts)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """all_gather of each input into a list with one tensor per rank."""
        inputs = _listed(inputs)
        lists = _lists(outputs)
        for index, (buffers, tensor) in enumerate(zip(lists, inputs, strict=True)):
            _expect_count("output tensors of all_gather", len(buffers), self.size(), index)
            _expect_elements("the own buffer of all_gather", buffers[self.group_rank], tensor.numel())
        return self._issue(Call("all_gather", inputs, [buffer for buffers in lists for buffer in buffers], is_async=_is_async(opts)))

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """all_gather of several tensors; ``output_lists[rank][i]`` receives tensor i of ``rank``."""
        inputs, output_lists = _listed(inputs), _lists(output_lists)
        outputs = [output_lists[rank][i] for i in range(len(inputs)) for rank in range(self.size())]
        return self._issue(Call("all_gather", inputs, outputs, is_async=_is_async(opts)))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """all_gather into one tensor, rank after rank by elements."""
        return self._all_gather_single([waited(output)], [waited(tensor)], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Several all_gathers into one tensor each."""
        outputs, inputs = _listed(outputs), _listed(inputs)
        _expect_real("all_gather of several tensors", inputs)
        return self._all_gather_single(outputs, inputs, opts)

    def _all_gather_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            _expect_elements("the output of all_gather", output, tensor.numel() * self.size())
        return self._issue(Call("all_gather", inputs, outputs, is_async=_is_async(opts)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """reduce_scatter of a list with one tensor per rank."""
        outputs = _listed(outputs)
        lists = _lists(inputs)
        for index, (chunks, output) in enumerate(zip(lists, outputs, strict=True)):
            _expect_count("input tensors of reduce_scatter", len(chunks), self.size(), index)
            _expect_elements("the output of reduce_scatter", output, chunks[self.group_rank].numel())
        call = Call("reduce_scatter", [chunk for chunks in lists for chunk in chunks], outputs, _reduce_op(opts), is_async=_is_async(opts))
        return self._issue(call)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """reduce_scatter of one tensor, cut by elements."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Several reduce_scatters of one tensor each."""
        outputs, inputs = _listed(outputs), _listed(inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            _expect_elements("the input of reduce_scatter", tensor, output.numel() * self.size())
        parts = [part for tensor in inputs for part in _chunks(tensor, self.size())]
        call = Call("reduce_scatter", parts, outputs, _reduce_op(opts), is_async=_is_async(opts))
        return self._issue(call, whole_inputs=inputs)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        """broadcast in place from ``opts.rootRank``."""
        tensors = _listed(tensors)
        written = [] if self.group_rank == self._root(opts) else tensors
        return self._issue(Call("broadcast", tensors, written, root=self._root(opts), is_async=_is_async(opts)))

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """reduce in place to ``opts.rootRank``; other ranks' tensors keep their value."""
        tensors = _listed(tensors)
        written = tensors if self.group_rank == self._root(opts) else []
        call = Call("reduce", tensors, written, _reduce_op(opts), root=self._root(opts), is_async=_is_async(opts))
        return self._issue(call)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """gather to a list on the root."""
        _expect_real("gather", _listed(inputs))
        lists = _lists(outputs)
        buffers = [buffer for buffers in lists for buffer in buffers] if self.group_rank == self._root(opts) else []
        if self.group_rank == self._root(opts):
            _expect_count("output tensors of gather on the root", len(buffers), self.size(), 0)
            _expect_elements("the own buffer of gather", buffers[self.group_rank], _listed(inputs)[0].numel())
        return self._issue(Call("gather", _listed(inputs), buffers, root=self._root(opts), is_async=_is_async(opts)))

    def gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """gather into one tensor on the root, rank after rank by elements; the other ranks' output is not used."""
        _expect_real("gather", _listed(tensor))
        written = _listed(output) if self.group_rank == self._root(opts) else []
        for buffer in written:
            _expect_elements("the output of gather on the root", buffer, tensor.numel() * self.size())
        return self._issue(Call("gather", _listed(tensor), written, root=self._root(opts), is_async=_is_async(opts)))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """scatter a list from the root."""
        lists = _lists(inputs)
        chunks = [chunk for chunks in lists for chunk in chunks] if self.group_rank == self._root(opts) else []
        if self.group_rank == self._root(opts):
            _expect_count("input tensors of scatter on the root", len(chunks), self.size(), 0)
            _expect_elements("the output of scatter", _listed(outputs)[0], chunks[self.group_rank].numel())
        return self._issue(Call("scatter", chunks, _listed(outputs), root=self._root(opts), is_async=_is_async(opts)))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """all_to_all of lists with one tensor per rank."""
        outputs, inputs = _listed(outputs), _listed(inputs)
        _expect_real("all_to_all", inputs)
        _expect_count("input tensors of all_to_all", len(inputs), self.size(), 0)
        _expect_count("output tensors of all_to_all", len(outputs), self.size(), 0)
        return self._issue(Call("all_to_all", inputs, outputs, is_async=_is_async(opts)))

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> dist.Work:
        """all_to_all of one tensor, cut along dimension 0 by the given sizes or evenly."""
        output, tensor = waited(output), waited(tensor)
        _expect_real("all_to_all", [tensor])
        parts = tuple(part.numel() for part in _split(output, output_splits, self.size(), "output"))
        inputs = _split(tensor, input_splits, self.size(), "input")
        if not output_splits and not input_splits:
            _expect_elements("the output of all_to_all without split sizes", output, tensor.numel())
        return self._issue(Call("all_to_all", inputs, [output], parts=parts, is_async=_is_async(opts)), whole_inputs=[tensor])

    def send(self, tensors: Any, destination: int, tag: int = 0) -> dist.Work:
        """send to a group rank; complete when received."""
        return self._joined(self.endpoint.send(self, _message(tensors), destination, tag))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        """recv from a group rank."""
        return self._joined(self.endpoint.recv(self, _message(tensors), source, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """recv from whichever rank sent first."""
        return self._joined(self.endpoint.recv(self, _message(tensors), None, tag))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks of the group."""
        return self._issue(Call("barrier", [], [], is_async=_is_async(opts)))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks of the group; a rank that does not come is named anyway."""
        self.barrier().wait()

    def _start_coalescing(self, device: Any = None) -> None:
        self._batch = []

    def _end_coalescing(self, device: Any = None) -> dist.Work:
        works, self._batch = self._batch or [], None
        return self.endpoint.all_of(works)

    def _root(self, opts: Any) -> int:
        root = int(getattr(opts, "rootRank", 0))
        if not 0 <= root < self.size():
            raise CollectiveRefused(f"Expected a root from 0 to {self.size() - 1} in a group of {self.size()} but got root={root}")
        return root

    def _issue(self, call: Call, whole_inputs: Sequence[Tensor] | None = None) -> dist.Work:
        _expect_known_dtype(*call.inputs, *call.outputs)
        _expect_storage(*call.inputs, *call.outputs)
        _expect_one_dtype(call)
        if call.reduce_op:
            for tensor in call.inputs:
                check_reducible(tensor.dtype, call.reduce_op)
        if self._batch is not None:
            call.is_async = True
        return self._joined(self.endpoint.issue(self, call, call.inputs if whole_inputs is None else whole_inputs))

    def _joined(self, work: SimWork) -> SimWork:
        if self._batch is not None:
            # Nothing of a batch may be waited for before all of it has been issued.
            work.held = True
            self._batch.append(work)
        return work

    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    gather_into_tensor = gather_single
    alltoall_base = all_to_all_single


RELEASE_NAMES = (
    ("allreduce",),
    ("allreduce_coalesced",),
    ("allgather",),
    ("allgather_coalesced",),
    ("all_gather_single", "_allgather_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("reduce_scatter",),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    ("broadcast",),
    ("reduce",),
    ("gather",),
    ("gather_single", "gather_into_tensor"),
    ("scatter",),
    ("alltoall",),
    ("all_to_all_single", "alltoall_base"),
    ("send",),
    ("recv",),
    ("recv_anysource",),
    ("barrier",),
)
"""Each collective method's names, newest first; the gathers into one tensor exist from torch 2.14."""


_UNKNOWN_DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32)
"""Neither gloo nor NCCL has a name for them."""


def _listed(tensors: Any) -> list[Tensor]:
    return [waited(tensor) for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)]


def _message(tensors: Any) -> Tensor:
    tensor = _listed(tensors)[0]
    _expect_storage(tensor)
    return tensor


def _lists(tensors: Any) -> list[list[Tensor]]:
    return [_listed(part) for part in tensors] if tensors and isinstance(tensors[0], (list, tuple)) else [_listed(tensors)]


def _is_async(opts: Any) -> bool:
    return bool(getattr(opts, "asyncOp", True))


def _reduce_op(opts: Any) -> str:
    operator = getattr(opts, "reduceOp", opts)
    return _op_name(getattr(operator, "op", operator))


@functools.cache
def _op_name(operator: Any) -> str:
    return "SUM" if operator is None else str(getattr(operator, "name", operator))


def _chunks(tensor: Tensor, count: int) -> Sequence[Tensor]:
    with PlainTensors():
        return tensor.reshape(-1).chunk(count) if tensor.numel() else [tensor.reshape(-1)] * count


def _split(tensor: Tensor, sizes: Any, count: int, what: str) -> list[Tensor]:
    if tensor.dim() == 0:
        raise CollectiveRefused(f"Expected an {what} of all_to_all with at least one dimension but got a scalar")
    if not sizes:
        if tensor.shape[0] % count:
            raise CollectiveRefused(
                f"Expected the {what} of all_to_all to divide by the group size {count} but got {len(tensor)} rows: give split sizes"
            )
        sizes = [tensor.shape[0] // count] * count
    _expect_count(f"{what} split sizes of all_to_all", len(sizes), count, 0)
    if sum(sizes) != tensor.shape[0]:
        raise CollectiveRefused(f"Expected {what} split sizes that add up to {tensor.shape[0]} rows but got {list(sizes)}")
    with PlainTensors():
        return list(torch.split(tensor, list(sizes)))


def _expect_known_dtype(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype in _UNKNOWN_DTYPES:
            raise CollectiveRefused(f"Expected a dtype that gloo or NCCL can send but got dtype={tensor.dtype}")


def _expect_storage(*tensors: Tensor) -> None:
    """Fake tensors and wrappers hold no numbers, and kernels that look for them end the process."""
    for tensor in tensors:
        if type(tensor) is not Tensor and tensor.numel() and not tensor.is_meta and not _address(tensor):
            raise CollectiveRefused(f"Expected a tensor that holds numbers but got a {type(tensor).__name__}: hand over what it stands for")


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _expect_real(what: str, tensors: Sequence[Tensor]) -> None:
    """Backends know complex numbers by the kind; where they do not, PyTorch's Python functions hand over a real view, or nothing does."""
    for tensor in tensors:
        if tensor.is_complex():
            raise CollectiveRefused(f"Expected real numbers for {what} but got dtype={tensor.dtype}: give torch.view_as_real of it")


def _expect_one_dtype(call: Call) -> None:
    """Inputs and the outputs that they fill are dealt out evenly, in order."""
    few, many = sorted((call.inputs, call.outputs), key=len)
    for index, tensor in enumerate(many if few else []):
        other = few[index * len(few) // len(many)]
        if tensor.dtype != other.dtype:
            raise CollectiveRefused(f"Expected one dtype for what {call.kind} reads and writes but got {tensor.dtype} and {other.dtype}")


def _expect_count(what: str, got: int, expected: int, index: int) -> None:
    if got != expected:
        raise CollectiveRefused(f"Expected {expected} {what}, one per rank, but got {got} (list {index})")


def _expect_elements(what: str, tensor: Tensor, expected: int) -> None:
    if tensor.numel() != expected:
        raise CollectiveRefused(f"Expected {what} to have {expected} elements but got shape={tuple(tensor.shape)}")
