"""Processes that stand in for the machines of a cluster: gloo ranks that run one function after another.

A `Ranks` starts its processes once. `run` calls a function, which other processes must be able to import, in every
process of a group, with the group first, and returns what each of them returned or raises what all of them raised.
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

from continuous_attention import (
    context_parallel_attention,
    parallelize_context,
    shard_batch,
    shard_sequence,
    switch_to_continuous,
    take_times,
    unshard_sequence,
)

TIMEOUT = 60  # seconds
# Of 2, 3 and 4 processes; numbers in the group aren't always those in the world.
GROUPS = ((1, 3), (0, 2, 3), (0, 1, 2, 3))


class Ranks:
    """Gloo ranks on this machine, to be closed."""

    def __init__(self, count: int, folder: Path) -> None:
        context = mp.get_context("forkserver")
        # Imported once, not in every process; torch imports the second one when it first goes backward.
        context.set_forkserver_preload([__name__, "torch.fx.experimental.symbolic_shapes"])
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = (rank, count, str(folder / "store"), there)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            self.connections.append(here)

    def run(self, size: int, function: Callable[..., Any], *each: list[Any] | Any) -> list[Any]:
        """What `function(group, *arguments)` returned in the group of that size; a list has an argument per rank."""
        members = GROUPS[size - 2]
        for i, rank in enumerate(members):
            arguments = [x[i] if isinstance(x, list) else x for x in each]
            self.connections[rank].send((members, function, arguments))
        answers = []
        for rank in members:
            assert self.connections[rank].poll(TIMEOUT), f"rank {rank} doesn't answer to {function.__name__}"
            answers.append(self.connections[rank].recv())
        errors = [answer for raised, answer in answers if raised]
        if not errors:
            return [answer for _, answer in answers]
        texts = "\n".join(text for _, text in errors)
        assert len(errors) == len(members), f"{len(errors)} of {len(members)} ranks raised:\n{texts}"
        assert len({(type(error), str(error)) for error, _ in errors}) == 1, f"ranks raised different errors:\n{texts}"
        raise errors[0][0]

    def close(self) -> None:
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.join(TIMEOUT)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, count: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    how: dict[str, Any] = {"world_size": count, "rank": rank, "timeout": timedelta(seconds=TIMEOUT / 2)}
    dist.init_process_group("gloo", init_method=f"file://{store}", **how)
    groups = {members: dist.new_group(list(members)) for members in GROUPS}
    while (asked := connection.recv()) is not None:
        members, function, arguments = asked
        try:
            answer = False, function(groups[members], *arguments)
        except Exception as error:
            answer = True, (error, traceback.format_exc())
        connection.send(answer)
    dist.destroy_process_group()


def attend(
    group: dist.ProcessGroup,
    leaves: dict[str, Tensor],
    how: dict[str, Any],
    numbers: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """This rank's out, lse and gradients, from whole tensors and the numbers of its queries and nodes."""
    leaves = {name: own_part(name, x, *numbers).detach().requires_grad_() for name, x in leaves.items()}
    out, lse = call(group, leaves, how, numbers)
    out_gradient, lse_gradient = (own_part("query", x, *numbers) for x in gradients)
    torch.autograd.backward((out, lse), [out_gradient, lse_gradient.where(lse.isfinite(), 0.0)])
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return {name: x.detach() for name, x in {"out": out, "lse": lse, **grads}.items()}


def call(
    group: dist.ProcessGroup, leaves: dict[str, Tensor], how: dict[str, Any], numbers: tuple[Tensor, Tensor]
) -> Any:
    """The attention of this rank, from its part of the leaves and the whole of everything else."""
    arguments: dict[str, Any] = {name: own_part(name, x, *numbers) for name, x in how.items()} | leaves
    if "k0" in leaves:
        arguments["boundary"] = arguments.pop("k0"), arguments.pop("v0")
    return context_parallel_attention(**arguments, group=group, return_lse=True)


def own_part(name: str, x: Any, of_queries: Tensor, of_nodes: Tensor) -> Any:
    """A rank's part of an argument, by its name."""
    dims = {"query": 2, "key": 2, "value": 2, "intervals": 1, "times": -1, "query_times": -1}
    if name not in dims:
        return x
    return x.index_select(dims[name], of_nodes if name in ("key", "value", "times") else of_queries)


def count_bytes(
    group: dist.ProcessGroup, leaves: dict[str, Tensor], how: dict[str, Any], numbers: tuple[Tensor, Tensor]
) -> tuple[int, int]:
    """The bytes that this rank sends to single ranks, forward and backward."""
    leaves = {name: own_part(name, x, *numbers).requires_grad_() for name, x in leaves.items()}
    sent = []
    exchange = dist.batch_isend_irecv

    def count(messages: list[dist.P2POp]) -> Any:
        sent.append(sum(message.tensor.nbytes for message in messages if message.op is dist.isend))
        return exchange(messages)

    dist.batch_isend_irecv = count
    try:
        out, _ = call(group, leaves, how, numbers)
        forward = sum(sent)
        out.sum().backward()
    finally:
        dist.batch_isend_irecv = exchange
    return forward, sum(sent) - forward


def call_plainly(group: dist.ProcessGroup, arguments: dict[str, Any]) -> Any:
    return context_parallel_attention(**arguments, group=group)


@torch.no_grad()
def call_without_gradients(
    group: dist.ProcessGroup, leaves: dict[str, Tensor], how: dict[str, Any], numbers: tuple[Tensor, Tensor]
) -> Tensor:
    return call(group, {name: own_part(name, x, *numbers) for name, x in leaves.items()}, how, numbers)[0]


def call_autocast(group: dist.ProcessGroup, *arguments: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return call_without_gradients(group, *arguments)


def differentiate_twice(group: dist.ProcessGroup, arguments: dict[str, Tensor], name: str) -> bool:
    """Whether the gradient of an argument has a gradient itself, and raise what its gradient raises."""
    leaves: dict[str, Any] = {of_leaf: x.clone().requires_grad_() for of_leaf, x in arguments.items()}
    out = context_parallel_attention(**leaves, group=group, is_causal=True)
    assert isinstance(out, Tensor)
    (gradient,) = torch.autograd.grad(out.sum(), leaves[name], create_graph=True)
    if gradient.requires_grad:
        torch.autograd.grad(gradient.square().sum(), leaves[name])
    return gradient.requires_grad


def shard_over_a_mesh_of_two_dims(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh

    return shard_sequence(x, 0, group=init_device_mesh("cpu", (2, 2)))


def shard(group: dist.ProcessGroup, x: Tensor, placement: str) -> Tensor:
    return shard_sequence(x, 0, group=group, placement=placement)


def unshard(group: dist.ProcessGroup, x: Tensor, dim: int) -> Tensor:
    return unshard_sequence(x, dim, group=group)


def shard_and_unshard(group: dist.ProcessGroup, x: Tensor, placement: str) -> tuple[Tensor, Tensor, Tensor]:
    """The whole again, this rank's part, and its gradient where each rank asks for its own number, from 1, as one."""
    own = shard_sequence(x, 1, group=group, placement=placement).requires_grad_()
    whole = unshard_sequence(own, -2, group=group, placement=placement)
    whole.backward(torch.full_like(whole, dist.get_rank(group) + 1.0))
    assert own.grad is not None
    return whole.detach(), own.detach(), own.grad


# Hugging Face models


def tiny_model(
    family: str = "Llama", layers: Any = "all", boundary: str = "zero", checkpoints: bool = False, **config: Any
) -> Any:
    """The same random model in every process."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    head, dtype = config.pop("head", "ForCausalLM"), config.pop("dtype", torch.float64)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **heads, "initializer_range": 0.3, **config})
    model = getattr(transformers, family + head)(config).to(dtype)
    switch_to_continuous(model, layers=layers, boundary=boundary)
    for name, parameter in model.named_parameters():
        if "boundary" in name:
            torch.nn.init.normal_(parameter)
    if family == "Phimoe":
        model.eval()  # its routers draw at random in training
    if checkpoints:
        model.train().activation_checkpointing_enable()
    return model


def train_spread(
    group: dist.ProcessGroup, batch: dict[str, Tensor], placement: str, schedule: str, how: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a rank's part of the batch, and the gradients that it has for the parameters."""
    model = tiny_model(**how)
    parallelize_context(model, group=group, placement=placement, schedule=schedule)
    if "times" in batch:
        take_times(model)
    loss = model(**shard_batch(batch, group=group, placement=placement), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters()}


def train_spread_and_sharded(
    group: dist.ProcessGroup, batches: list[dict[str, Tensor]], how: dict[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    """One step on a mesh of 2 × 2: a batch for each row, spread over its columns, and the parameters over all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = tiny_model(**how)
    parallelize_context(model, group=mesh["cp"], placement="zigzag")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = batches[mesh.get_local_rank("dp")]
    loss = model(**shard_batch(batch, group=mesh["cp"], placement="zigzag"), use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {name: x.grad.full_tensor() for name, x in model.named_parameters()}


def run_spread(group: dist.ProcessGroup, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a model that is spread over ranks, given a batch that wasn't cut."""
    model = tiny_model()
    parallelize_context(model, group=group)
    return model(**batch).loss


def logits_of_spread(group: dist.ProcessGroup, batch: dict[str, Tensor], how: dict[str, Any]) -> Tensor:
    """The logits of a rank's part of the batch."""
    model = tiny_model(**how).eval()
    parallelize_context(model, group=group)
    part = shard_batch(batch, group=group)
    return model(**{name: part[name] for name in ("input_ids", "position_ids", "attention_mask")}).logits.detach()


def cut_otherwise(group: dist.ProcessGroup, placement: str, whole_world: bool) -> None:
    """A model and a batch that were spread in different ways."""
    model = tiny_model()
    parallelize_context(model, group=None if whole_world else group)
    model(**shard_batch({"input_ids": torch.ones(1, 8).long()}, group=group, placement=placement), use_cache=False)


def switch_while_spread(group: dist.ProcessGroup) -> None:
    model = tiny_model()
    parallelize_context(model, group=group)
    switch_to_continuous(model)


def shard_tokens(group: dist.ProcessGroup, batch: Any, placement: str) -> dict[str, Tensor]:
    return shard_batch(batch, group=group, placement=placement)


def stop_being_spread(group: dist.ProcessGroup, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a whole batch on each rank by itself, after `remove`."""
    model = tiny_model()
    parallelize_context(model, group=group).remove()
    return model(**batch, use_cache=False).loss.detach()
