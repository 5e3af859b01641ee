"""The ranks of a process group: which nodes each has, what all must agree on, the messages between them.

Shape legend: n ranks; a run is a range of nodes of the whole sequence that one rank has without a gap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from continuous_attention.checks import check_choice, check_integer, dtype_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PLACEMENTS = ("contiguous", "zigzag")
T = TypeVar("T")


def shard_sequence(
    x: Tensor, dim: int, *, group: dist.ProcessGroup | DeviceMesh | None = None, placement: str = "contiguous"
) -> Tensor:
    """This rank's part of a tensor that has the whole sequence along a dim, as `context_parallel_attention` wants it.

    Lengths need not be divisible: earlier runs are longer by one. `shard_sequence(torch.arange(length), 0)` gives the
    numbers of this rank's nodes.

    Args:
        x: the whole, the same on every rank; nothing is sent.
        dim: of the sequence.
        group: a process group, or a device mesh with one dim; None for all processes.
        placement: "contiguous" or "zigzag".

    Returns:
        A tensor like `x`, shorter along `dim`.

    Raises:
        ValueError, TypeError: an argument is wrong.
    """
    team = Team(group)
    _check_sequence(x, dim, placement)
    pieces = team.size * (2 if placement == "zigzag" else 1)
    sizes = [x.shape[dim] // pieces + (i < x.shape[dim] % pieces) for i in range(pieces)]
    if placement == "zigzag":
        sizes = [sizes[rank] + sizes[-1 - rank] for rank in range(team.size)]
    return x.index_select(dim, numbers_of(runs_of(sizes, placement)[team.rank], x.device))


def unshard_sequence(
    x: Tensor, dim: int, *, group: dist.ProcessGroup | DeviceMesh | None = None, placement: str = "contiguous"
) -> Tensor:
    """The whole of a sequence from its parts, on every rank: what `shard_sequence` undoes.

    Differentiable: each rank gets the sum of what all ranks say about its part. Shapes must agree but for the length.

    Args:
        x: this rank's part.
        dim: of the sequence.
        group: a process group, or a device mesh with one dim; None for all processes.
        placement: "contiguous" or "zigzag".

    Returns:
        A tensor like `x`, longer along `dim`.

    Raises:
        ValueError, TypeError: an argument is wrong, or the ranks disagree about it; on every rank.
    """
    team = Team(group)
    _, error = attempt(lambda: _check_sequence(x, dim, placement))
    facts: dict[str, object] = {}
    if error is None:
        others = [length for i, length in enumerate(x.shape) if i != dim % x.ndim]
        facts = {"dim": dim, "placement": placement, "x's shape without dim": others, "x's dtype": dtype_name(x.dtype)}
        facts["whether x has a gradient"] = torch.is_grad_enabled() and x.requires_grad
    lengths = team.agree(facts, [x.shape[dim] if error is None else 0], error)
    return gather_runs(x, dim, team, runs_of([length for (length,) in lengths], placement))


def _check_sequence(x: Any, dim: Any, placement: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    check_choice("placement", placement, PLACEMENTS)
    check_integer("dim", dim, -x.ndim)
    if dim >= x.ndim:
        raise ValueError(f"dim must be one of the {x.ndim} dims of x, got {dim}")


# ---- Gradients that can't be differentiated again


def tie_of(*tensors: Tensor | None) -> Tensor | None:
    """Nothing that has a gradient, which comes from all of the tensors that have one; it keeps none of them alive."""
    if not torch.is_grad_enabled():
        return None
    empty = [x[..., :0].double().flatten() for x in tensors if x is not None and x.requires_grad]
    return torch.cat(empty) if empty else None


def differentiable_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """`backward` of a function whose ctx has the `tie` of its inputs: whoever differentiates its result hears that."""

    def run(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        return tuple(None if x is None else _Once.apply(x, ctx.tie, *gradients) for x in found)

    return run


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "what ranks do together can be differentiated once; for derivatives of higher order call "
            'continuous_attention with backend="reference" in one process'
        )


# ---- Who has which nodes


def runs_of(lengths: list[int], placement: str) -> list[list[range]]:
    """The numbers of each rank's nodes, run by run, from how many they are."""
    if placement == "contiguous":
        return [[range(stop - length, stop)] for length, stop in zip(lengths, accumulate(lengths), strict=True)]
    halves = [(length + 1) // 2 for length in lengths]
    halves += [length // 2 for length in reversed(lengths)]
    runs = [range(stop - length, stop) for length, stop in zip(halves, accumulate(halves), strict=True)]
    return [[runs[rank], runs[-1 - rank]] for rank in range(len(lengths))]


def numbers_of(runs: list[range], device: torch.device) -> Tensor:
    """The numbers of a rank's nodes in their order there."""
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def first_of(run: range) -> int:
    """The first node of a run in a block, its halo if it has one."""
    return run.start - 1 if run and run.start > 0 else run.start


class Halo(NamedTuple):
    """The node before a run, which another run has: rank and number of the run there."""

    run: tuple[int, int]
    origin: tuple[int, int]


def halos_of(runs: list[list[range]]) -> list[Halo]:
    """The halos of all ranks' runs, in the order of the nodes."""
    placed = sorted((run.start, rank, i) for rank, own in enumerate(runs) for i, run in enumerate(own) if run)
    return [Halo(after[1:], before[1:]) for before, after in pairwise(placed)]


def gather_runs(x: Tensor, dim: int, team: Team, runs: list[list[range]]) -> Tensor:
    """The whole of a tensor that is spread along a dim; backward, the sum of all ranks' gradients of the own part."""
    return _Gathered.apply(x, tie_of(x), dim, team, runs)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tie: Tensor | None, dim: int, team: Team, runs: list[list[range]]) -> Tensor:
        ctx.tie, ctx.dim, ctx.team, ctx.runs = tie, dim, team, runs
        moved = x.movedim(dim, 0)
        others = moved.shape[1:]
        lengths = [sum(map(len, own)) for own in runs]
        blocks, works = team.gather(moved.reshape(-1), [length * others.numel() for length in lengths])
        for work in works:
            work.wait()
        whole = x.new_empty((sum(lengths), *others))
        for own, block in zip(runs, blocks, strict=True):
            whole[numbers_of(own, x.device)] = block.view(sum(map(len, own)), *others)
        return whole.movedim(0, dim)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.team.group)
        own = gradient.index_select(ctx.dim, numbers_of(ctx.runs[ctx.team.rank], gradient.device))
        return own, None, None, None, None


# ---- The ranks, and what they must agree on


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What it returns, or what it raises: other ranks have to hear of it before this one leaves."""
    try:
        return function(), None
    except Exception as error:
        return None, error


class Team:
    """The ranks of a group, and the messages between them."""

    def __init__(self, group: Any) -> None:
        if getattr(group, "ndim", 1) != 1:
            raise ValueError(f"group must be a device mesh with one dim, such as mesh['cp'], got one with {group.ndim}")
        if hasattr(group, "get_group"):
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group must be a process group this process is in, or a device mesh with one dim, got "
                f"{type(group).__name__}"
            )
        self.group: dist.ProcessGroup = dist.group.WORLD if group is None else group  # pyright: ignore[reportAttributeAccessIssue]
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError("group must contain this process, got one without it")
        # Numbers to be read by Python: on the CPU where the group can, or they'd wait for the accelerator.
        on_cpu = "cpu:" in dist.get_backend_config(self.group)
        self.device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()

    def agree(self, facts: dict[str, object], numbers: list[int], error: Exception | None) -> list[list[int]]:
        """Every rank's numbers, if no rank has an error and the facts are the same on all of them."""
        digest = hashlib.sha256(repr(facts).encode()).digest()
        row = torch.tensor([int.from_bytes(digest[:7], "big"), error is not None, *numbers], device=self.device)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, group=self.group)
        table = torch.stack(rows).tolist()
        if any(failed for _, failed, *_ in table):
            self._raise(error)
        if len({of_facts for of_facts, *_ in table}) > 1:
            self._raise_difference(facts)
        return [rest for _, _, *rest in table]

    def highest(self, numbers: list[int], error: Exception | None) -> list[int]:
        """For each number the highest of all ranks, if no rank has an error."""
        row = torch.tensor([error is not None, *numbers], device=self.device)
        dist.all_reduce(row, dist.ReduceOp.MAX, group=self.group)
        failed, *found = row.tolist()
        if failed:
            self._raise(error)
        return found

    def exchange(self, sent: list[tuple[Tensor, int]], received: list[tuple[Tensor, int]]) -> list[Any]:
        """Begin to send tensors to ranks and to receive them; to be waited for. Those without elements stay."""
        messages = [(dist.isend, *x) for x in sent] + [(dist.irecv, *x) for x in received]
        requests = [
            dist.P2POp(way, x.view(torch.uint8), dist.get_global_rank(self.group, rank), self.group)
            for way, x, rank in messages
            if x.numel()
        ]
        return dist.batch_isend_irecv(requests) if requests else []

    def after(self, steps: int) -> int:
        """The rank that many steps behind this one, round and round."""
        return (self.rank + steps) % self.size

    def gather(self, x: Tensor, sizes: Sequence[int]) -> tuple[list[Tensor], list[Any]]:
        """Begin to collect all ranks' tensors with one dim, of these sizes; to be waited for."""
        longest = max(sizes)
        rows = [x.new_empty(longest) for _ in sizes]
        found = [row[:size] for row, size in zip(rows, sizes, strict=True)]
        if not longest:
            return found, []
        padded = F.pad(x, (0, longest - len(x))).view(torch.uint8)
        views = [row.view(torch.uint8) for row in rows]
        return found, [dist.all_gather(views, padded, group=self.group, async_op=True)]

    def _raise(self, error: Exception | None) -> None:
        """Raise what is wrong, on whichever rank, on all of them."""
        told = None if error is None else (type(error).__name__, str(error))
        heard: list[Any] = [None] * self.size
        dist.all_gather_object(heard, told, group=self.group)
        first = next(x for x in heard if x is not None)
        ranks = [rank for rank, x in enumerate(heard) if x == first]
        kinds = {kind.__name__: kind for kind in (ValueError, TypeError, NotImplementedError)}
        kind, message = kinds.get(first[0]), first[1] if first[0] in kinds else ": ".join(first)
        raise (kind or RuntimeError)(f"{message} ({_name_ranks(ranks)} of {self.size})") from error

    def _raise_difference(self, facts: dict[str, object]) -> None:
        """Raise on all ranks what the first difference is."""
        heard: list[Any] = [None] * self.size
        dist.all_gather_object(heard, {name: repr(x) for name, x in facts.items()}, group=self.group)
        for name in heard[0]:
            said: dict[str, list[int]] = {}
            for rank, others in enumerate(heard):
                said.setdefault(others[name], []).append(rank)
            if len(said) > 1:
                got = " and ".join(f"{x} ({_name_ranks(ranks)})" for x, ranks in said.items())
                raise ValueError(f"{name} must be the same on every rank of the group, got {got}")
        raise AssertionError("equal facts had different digests")


def _name_ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# ---- Blocks on their way


class Journey(NamedTuple):
    """How the blocks of all ranks, tensors with one dim, come to the ranks that need them."""

    team: Team
    sizes: list[int]  # of the blocks, in elements
    reach: list[int]  # how many ranks behind its own each block is needed
    gathers: bool  # all at once, else from rank to rank

    @property
    def order(self) -> list[int]:
        """Whose blocks are worked on: this rank's, that of the one before it, …, as far as any rank needs."""
        return [(self.team.rank - step) % self.team.size for step in range(max(self.reach) + 1)]

    def visit(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The ranks in `order` with their blocks; nothing of a block that is needed neither here nor further on.

        While the caller works on a block, the next one (or all of them) are on their way.
        """
        if self.gathers and max(self.reach):
            blocks, works = self.team.gather(own, self.sizes)
            blocks[self.team.rank] = own
            for step, rank in enumerate(self.order):
                yield rank, blocks[rank] if step <= self.reach[rank] else own[:0]
                while works:
                    works.pop().wait()
            return
        block = own
        for step, rank in enumerate(self.order):
            arriving = self.room_behind(step, own)
            sent = [(block, self.team.after(1))] if step < self.reach[rank] else []
            works = self.team.exchange(sent, [(arriving, self.team.after(-1))])
            yield rank, block
            for work in works:
                work.wait()
            block = arriving

    def room_behind(self, step: int, like: Tensor) -> Tensor:
        """Room for what the rank before this one hands on after a step; empty if it doesn't."""
        coming = self.team.after(-step - 1)
        return like.new_empty(self.sizes[coming] if step < self.reach[coming] else 0)


class Homeward:
    """Brings the gradients of blocks back to their ranks, adding up what each rank that needed one has for it.

    In a ring a sum follows its block from rank to rank, and goes home from the last one that needs it. Otherwise each
    rank sends its part straight home. Both add in the order of the ranks behind the block's own, which comes last.
    """

    def __init__(self, journey: Journey, like: Tensor) -> None:
        self.journey = journey
        self.own = self.others = self.arriving = like.new_empty(0)
        self.works: list[Any] = []
        self.sent: list[tuple[Tensor, int]] = []  # it must stay until it has been sent

    def put(self, step: int, part: Tensor) -> None:
        """Hand over what this rank has for the block at one step of `Journey.visit`."""
        journey, team, reach = self.journey, self.journey.team, self.journey.reach
        self._wait()
        if step == 0:
            self.own, self.sent = part, []
            return
        coming_home = part.new_empty(journey.sizes[team.rank] if step <= reach[team.rank] else 0)
        received = [(coming_home, team.after(step))]
        if journey.gathers:
            self.others = _add(self.others, self.arriving)
            self.arriving = coming_home
            self.sent = [(part, team.after(-step))]
        else:
            is_last = step == reach[team.after(-step)]
            self.sent = [(_add(part, self.arriving), team.after(-step if is_last else 1))]
            self.arriving = journey.room_behind(step, part)
            received = [(self.arriving, team.after(-1))]
            if step == reach[team.rank]:
                self.others = coming_home
                received.append((coming_home, team.after(step)))
        self.works = team.exchange(self.sent, received)

    def finish(self) -> Tensor:
        """The gradient of this rank's block."""
        self._wait()
        if self.journey.gathers:
            self.others = _add(self.others, self.arriving)
        return _add(self.own, self.others)

    def _wait(self) -> None:
        for work in self.works:
            work.wait()


def _add(to: Tensor, x: Tensor) -> Tensor:
    """The sum, in place, where both are there; else the one that is."""
    return x if not to.numel() else to.add_(x) if x.numel() else to
