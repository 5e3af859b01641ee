"""Hugging Face models whose sequences are spread over ranks.

`shard_batch` cuts a whole batch and resolves what padding and packed documents say about the whole sequence, because a
rank's model sees its own tokens only; `parallelize_context` makes the attention layers work together.

Shape legend: B batch, L length of the whole sequence, n ranks.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from continuous_attention import intervals as iv
from continuous_attention.checks import check_choice, check_shape, check_tensor
from continuous_attention.context_parallel import SCHEDULES, context_parallel_attention
from continuous_attention.integrations import masks
from continuous_attention.ranks import PLACEMENTS, Team, shard_sequence

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RANKS = "_continuous_ranks"  # attribute of the modules of a model: how its sequences are spread
WHOLE_NUMBERS = (torch.int32, torch.int64)
# The attention_mask that `shard_batch` makes is int64 (B, 1, 2 + own tokens, 5): before the rows of `_visible` one with
# the number of ranks, the placement, `_digest`, whether position_ids and attention_mask were given, and one of zeros.
HEADER, COLUMNS = 2, 5
IGNORED = -100  # the label of a token without one, as everywhere in transformers


@dataclass(frozen=True)
class Spread:
    """How the sequences of a model are spread over ranks."""

    team: Team
    schedule: str
    placement: str
    attention: Callable[..., Any]  # `context_parallel_attention`, which compiled code calls without looking into it
    cut: Callable[..., Any]  # `masks.cut_whole`, in the same way
    name: str  # of the model
    counts: str  # what positions that aren't given follow from: "order" (0, 1, 2, …), "padding" or "ids"
    sums_labels: bool  # whether its loss is that of a causal language model

    def __deepcopy__(self, memo: Any) -> Spread:
        """The ranks stay the same when a model is copied."""
        return self

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the model runs: take the attention_mask that `shard_batch` made, which is then in `masks.whole`.

        Raises:
            ValueError: `shard_batch` was given other ranks or another placement.
            NotImplementedError: the model does something with the batch that ranks can't do together.
        """
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dtype != torch.int64 or mask.ndim != 4 or mask.shape[-1] != COLUMNS:
            return None
        size, placed, members, *given = mask[:1, 0, 0].flatten().tolist()
        cut = f"placement={PLACEMENTS[placed]!r} and {size} ranks", members
        own = f"placement={self.placement!r} and {self.team.size} ranks", _digest(self.team)
        if cut != own:
            others = "" if cut[0] != own[0] else ", but not the same ones"
            raise ValueError(
                f"group and placement must be the same in shard_batch and parallelize_context, got {cut[0]} in "
                f"shard_batch, {own[0]} in parallelize_context{others}"
            )
        gave_positions, gave_mask = given
        if not gave_positions and (self.counts == "ids" or (self.counts == "padding" and gave_mask)):
            raise NotImplementedError(
                f"{self.name} counts positions by {self.counts} and not by order: give shard_batch the position_ids "
                "(B, L) that it would make of the whole batch"
            )
        if kwargs.get("labels") is not None and not self.sums_labels:
            raise NotImplementedError(
                f"the loss of {self.name} isn't that of a causal language model, the only one that ranks share: leave "
                "labels out, and make the loss from the logits and shard_sequence(labels, 1)"
            )
        routed = kwargs.get("output_router_logits")
        if getattr(module.config.get_text_config(), "output_router_logits", False) if routed is None else routed:
            raise NotImplementedError(
                f"output_router_logits must be False in {self.name}: the loss of its routers isn't a sum over tokens, "
                "so ranks can't share it"
            )
        said = mask[:, 0, HEADER:]
        whole = masks.Whole(said[..., :2], said[..., 2:4], said[..., 4])
        masks.whole, masks.whole_of = partial(self.cut, whole), module
        return args, {**kwargs, "attention_mask": None}

    def leave(self, module: Any, *_: Any) -> None:
        """After the model ran, or failed."""
        if masks.whole_of is module:
            masks.whole = masks.whole_of = None

    def attend(self, module: nn.Module, nodes: tuple[Tensor, Tensor, Tensor], mask: Any, **how: Any) -> Any:
        """`context_parallel_attention` for a layer of a model, from query, key and value and the model's mask.

        Raises:
            ValueError: the batch doesn't come from `shard_batch`.
            NotImplementedError: something was asked for that ranks can't do together.
        """
        query, key, value = nodes
        intervals = masks.unmark_whole(mask, query.shape[2]) if isinstance(mask, Tensor) else None
        if intervals is None:
            raise ValueError(
                f"{type(module).__name__} works with other ranks since parallelize_context(model), and must be given "
                "the batch that shard_batch made, got another attention_mask or none"
            )
        if key.shape[2] != query.shape[2]:
            raise NotImplementedError(
                f"{type(module).__name__} has {query.shape[2]} queries and {key.shape[2]} nodes: caches can't be "
                "spread over ranks"
            )
        return self.attention(
            query,
            key,
            value,
            group=self.team.group,
            schedule=self.schedule,
            placement=self.placement,
            enable_gqa=True,
            intervals=intervals,
            reduce_boundary=False,
            **how,
        )


class Handle:
    """What `parallelize_context` returns."""

    def __init__(self, model: nn.Module, hooks: list[Any]) -> None:
        self.model, self.hooks = model, hooks

    def remove(self) -> None:
        """Make the model work alone again."""
        for module in self.model.modules():
            vars(module).pop(RANKS, None)
        for hook in self.hooks:
            hook.remove()


def parallelize_context(
    model: Any,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    schedule: str = "ring",
    placement: str = "contiguous",
) -> Handle:
    """Make the attention layers of a Hugging Face model work on sequences that are spread over ranks, in place.

    Every rank has the same model (or its part of one that FSDP shards) and calls it with its part of the batch, as
    `shard_batch` cuts it. Layers that run softmax (`continuous_layers`) work the same way. Parameters get the gradients
    of the rank's own tokens, as in data parallelism: DDP and FSDP over the same ranks average them, and since each
    rank's loss is n times its share of the whole one, the average is the whole gradient.

    Args:
        model: a `transformers.PreTrainedModel` with attn_implementation="continuous", a decoder or an encoder.
        group: the ranks that share a sequence: a process group, or a device mesh with one dim, such as mesh["cp"]; None
            for all processes.
        schedule: "ring" or "all-gather", see `context_parallel_attention`.
        placement: "contiguous" or "zigzag"; `shard_batch` must be given the same.

    Returns:
        A handle; its `remove()` makes the model work alone again, to generate for example.

    Raises:
        TypeError: the model isn't one of transformers.
        ValueError: an argument is wrong, or the model doesn't run continuous attention.
        NotImplementedError: the model has layers that this doesn't reach: encoder-decoders, attention in chunks, layers
            that mix nodes without attention; or it takes no position_ids.
        The forward raises ValueError for a batch that isn't from `shard_batch` with the same group and placement, and
        NotImplementedError for masks other than causal, bidirectional and sliding ones, labels of another loss than
        that of a causal language model, output_router_logits, and positions that only the whole batch says.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    check_choice("schedule", schedule, SCHEDULES)
    check_choice("placement", placement, PLACEMENTS)
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config._attn_implementation != "continuous":
        raise ValueError(
            f"{name} runs {model.config._attn_implementation!r} attention: make it continuous first, with "
            "switch_to_continuous(model)"
        )
    layers = {x for kinds in ("layer_types", "layers_block_type") for x in getattr(config, kinds, None) or []}
    layers -= {"full_attention", "sliding_attention", "attention"}
    if model.config.is_encoder_decoder or layers:
        what = f"layers of type {', '.join(sorted(layers))}" if layers else "an encoder and a decoder"
        raise NotImplementedError(f"{name} has {what}, whose sequences can't be spread over ranks")
    parts = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    innermost = [x for x in parts if not any(y is not x and y in parts for y in x.modules())]
    if not any("position_ids" in inspect.signature(type(x).forward).parameters for x in innermost):
        raise NotImplementedError(f"{name} takes no position_ids, so each rank's tokens would be the first ones")
    spread = Spread(
        Team(group),
        schedule,
        placement,
        torch.compiler.disable(context_parallel_attention),
        torch.compiler.disable(masks.cut_whole),
        name,
        counts=min(map(_counts, {type(module) for module in model.modules()}), key=("ids", "padding", "order").index),
        sums_labels=_sums_labels(model),
    )
    hooks = []
    for module in model.modules():
        setattr(module, RANKS, spread)
    for part in parts:
        hooks.append(part.register_forward_pre_hook(torch.compiler.disable(spread.enter), with_kwargs=True))
        hooks.append(part.register_forward_hook(torch.compiler.disable(spread.leave), always_call=True))
    return Handle(model, hooks)


@cache
def _source(x: Any) -> str:
    try:
        return inspect.getsource(x)
    except (OSError, TypeError):
        return ""


def _counts(kind: type) -> str:
    """What a class of modules makes positions of where none are given, see `Spread`."""
    source = "" if kind.__module__.startswith("torch.") else _source(kind)
    if re.search(r"cumsum\(attention_mask|attention_mask[\w.()]*\.cumsum", source):  # OPT
        return "padding"
    return "ids" if re.search(r"create_position_ids_from_input_ids|cumsum\(mask", source) else "order"  # RoBERTa


def _sums_labels(model: Any) -> bool:
    """Whether the model hands shift_labels and num_items_in_batch on to the loss of a causal language model."""
    calls = [
        re.search(r"self\.loss_function\(([^()]|\([^()]*\))*\*\*", _source(kind.__dict__["forward"]))
        for kind in type(model).__mro__
        if "forward" in kind.__dict__ and kind.__module__.startswith("transformers")
    ]
    return any(calls) and getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


def shard_batch(
    batch: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    placement: str = "contiguous",
) -> dict[str, Tensor]:
    """This rank's part of a batch for a causal language model that `parallelize_context` spread over ranks.

    Positions and labels are those of the whole sequence: labels are shifted before they are cut, and the loss is summed
    over the rank's tokens and divided by the number of all labels over n, so that the mean of the ranks' losses is the
    whole batch's loss.

    Args:
        batch: the whole batch, the same on every rank: input_ids (B, L) and, where wanted, attention_mask (B, L)
            without holes, position_ids (B, L) (in causal models packed documents begin where they don't rise), labels
            (B, L) as transformers wants them, times (L,) or (B, L) for `take_times`.
        group: as in `parallelize_context`.
        placement: as in `parallelize_context`.

    Returns:
        Keyword arguments of the model: input_ids, position_ids, attention_mask (which says what each query sees of the
        whole sequence; models hand it on as it is), and with labels also labels, shift_labels, num_items_in_batch.

    Raises:
        ValueError: a shape is wrong, the mask has holes, the batch has something that can't be cut, or fewer
            tokens than there are ranks.
        TypeError: a type or dtype is wrong.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a mapping of names to tensors, got {type(batch).__name__}")
    known = ("input_ids", "attention_mask", "position_ids", "labels", "times")
    unknown = [name for name in batch if name not in known]
    if unknown or "input_ids" not in batch:
        raise ValueError(f"batch must have input_ids and may have {', '.join(known[1:])}, got {', '.join(batch)}")
    for name, x in batch.items():
        check_tensor(name, x, (torch.float32, torch.float64) if name == "times" else (*WHOLE_NUMBERS, torch.bool), None)
    ids = batch["input_ids"]
    if ids.ndim != 2:
        raise ValueError(f"input_ids must have shape (B, L), got {tuple(ids.shape)}")
    for name in ("attention_mask", "position_ids", "labels"):
        if name in batch:
            check_shape(name, batch[name], [tuple(ids.shape)], "(B, L)")
    if "times" in batch:
        check_shape("times", batch["times"], [tuple(ids.shape[1:]), tuple(ids.shape)], "(L,) or (B, L)")

    team = Team(group)
    if ids.shape[1] < team.size:
        raise ValueError(f"input_ids must have a token for each of the {team.size} ranks, got L={ids.shape[1]}")

    def own(x: Tensor, dim: int = 1) -> Tensor:
        return shard_sequence(x, dim, group=group, placement=placement)

    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    part = {
        "input_ids": own(ids),
        "position_ids": own(positions),
        "attention_mask": F.pad(own(_visible(batch, ids)), (0, 0, HEADER, 0)).unsqueeze(1),
    }
    facts = [team.size, PLACEMENTS.index(placement), _digest(team), "position_ids" in batch, "attention_mask" in batch]
    part["attention_mask"][:, 0, 0] = torch.tensor(facts, device=ids.device)
    if "labels" in batch:
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        part["labels"] = part["shift_labels"] = own(labels)
        part["num_items_in_batch"] = (labels != IGNORED).sum() / team.size
    if "times" in batch:
        part["times"] = own(batch["times"], -1)
    return part


def _visible(batch: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """The nodes that aren't padding, those of each query's document, and its own: (B, L, 2 + 2 + 1)."""
    length = ids.shape[1]
    seen = iv.everything(length, ids.device).expand(len(ids), length, -1)
    if "attention_mask" in batch:
        real, contiguous = iv.of_mask(batch["attention_mask"].bool())
        if not contiguous:
            raise ValueError("attention_mask must have no holes, each row one run of ones")
        seen = iv.intersect(seen, real.unsqueeze(1))
    node = iv.standing(length, length, ids.device)
    documents = iv.everything(length, ids.device).expand_as(seen)
    if "position_ids" in batch:
        upward = iv.intersect(seen, iv.around(node, None, 0))
        begins = masks.of_position_ids(batch["position_ids"], upward, 0)[0][..., 0].contiguous()
        documents = torch.stack([begins, torch.searchsorted(begins, begins, right=True)], dim=-1)
    return torch.cat([seen, documents, node.expand(len(ids), -1).unsqueeze(-1)], dim=-1)


def _digest(team: Team) -> int:
    """A number that tells groups with other processes apart."""
    members = repr(dist.get_process_group_ranks(team.group))
    return int.from_bytes(hashlib.sha256(members.encode()).digest()[:7], "big")
