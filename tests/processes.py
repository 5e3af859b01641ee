"""Processes that stand in for the machines of a cluster: gloo ranks that run one function after another.

A `Ranks` starts its processes once. `run` calls a function, which spawned processes must be able to import, in every
process of a subgroup, with the group first, and returns what each of them returned or raises what one of them raised.
"""

import multiprocessing as mp
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from continuous_attention.context_parallel import context_parallel_attention

TIMEOUT = 60  # seconds


class Ranks:
    """Gloo ranks on this machine, to be closed."""

    def __init__(self, count: int, folder: Path, groups: list[list[int]]) -> None:
        context = mp.get_context("spawn")
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = (rank, count, str(folder / "store"), groups, there)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            self.connections.append(here)

    def run(self, ranks: list[int], function: Callable[..., Any], *each: list[Any] | Any) -> list[Any]:
        """What `function(group, *arguments)` returned on these ranks, an argument that is a list having one per rank.

        An error that all of them raise is raised; anything else that goes wrong is an AssertionError.
        """
        for i, rank in enumerate(ranks):
            arguments = [x[i] if isinstance(x, list) else x for x in each]
            self.connections[rank].send((ranks, function, arguments))
        answers = []
        for rank in ranks:
            assert self.connections[rank].poll(TIMEOUT), f"rank {rank} doesn't answer to {function.__name__}"
            answers.append(self.connections[rank].recv())
        errors = [x for x in answers if isinstance(x, tuple)]
        if not errors:
            return [x["result"] for x in answers]
        texts = "\n".join(text for _, text in errors)
        assert len(errors) == len(ranks), f"{len(errors)} of {len(ranks)} ranks raised:\n{texts}"
        assert len({str(error) for error, _ in errors}) == 1, f"ranks raised different errors:\n{texts}"
        raise errors[0][0]

    def close(self) -> None:
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.join(TIMEOUT)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, count: int, store: str, groups: list[list[int]], connection: Connection) -> None:
    torch.set_num_threads(1)
    how: dict[str, Any] = {"world_size": count, "rank": rank, "timeout": timedelta(seconds=TIMEOUT / 2)}
    dist.init_process_group("gloo", init_method=f"file://{store}", **how)
    known = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    while (asked := connection.recv()) is not None:
        ranks, function, arguments = asked
        try:
            connection.send({"result": function(known[tuple(ranks)], *arguments)})
        except Exception as error:
            connection.send((error, traceback.format_exc()))
    dist.destroy_process_group()


def attend(
    group: dist.ProcessGroup,
    leaves: dict[str, Tensor],
    how: dict[str, Any],
    numbers: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """This rank's out, lse and gradients, from the whole tensors and the numbers of its queries and nodes."""
    of_queries, of_nodes = numbers
    leaves = {name: _own(name, x, of_queries, of_nodes).detach().requires_grad_() for name, x in leaves.items()}
    arguments: dict[str, Any] = {name: _own(name, x, of_queries, of_nodes) for name, x in how.items()} | leaves
    if "k0" in leaves:
        arguments["boundary"] = arguments.pop("k0"), arguments.pop("v0")
    out, lse = context_parallel_attention(**arguments, group=group, return_lse=True)
    given = [_own("query", x, of_queries, of_nodes) for x in gradients]
    torch.autograd.backward((out, lse), given)
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return {name: x.detach() for name, x in {"out": out, "lse": lse, **grads}.items()}


def _own(name: str, x: Any, of_queries: Tensor, of_nodes: Tensor) -> Any:
    if name == "query":
        return x.index_select(2, of_queries)
    if name in ("key", "value"):
        return x.index_select(2, of_nodes)
    if name == "intervals":
        return x.index_select(1, of_queries)
    if name in ("times", "query_times"):
        return x.index_select(-1, of_nodes if name == "times" else of_queries)
    return x
