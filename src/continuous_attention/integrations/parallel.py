"""Hugging Face models whose sequences are spread over ranks.

`shard_batch` cuts a whole batch and resolves what padding and packed documents say about the whole sequence, because a
rank's model sees its own tokens only; `parallelize_context` makes the attention layers work together.

Shape legend: B batch, L length of the whole sequence, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from continuous_attention import intervals as iv
from continuous_attention.checks import check_choice, check_shape, check_tensor
from continuous_attention.context_parallel import SCHEDULES, context_parallel_attention
from continuous_attention.integrations import masks
from continuous_attention.ranks import PLACEMENTS, Team, shard_sequence

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

RANKS = "_continuous_ranks"  # attribute of the modules of a model: how its sequences are spread
WHOLE_NUMBERS = (torch.int32, torch.int64)
IGNORED = -100  # the label of a token without one, as everywhere in transformers


@dataclass(frozen=True)
class Spread:
    """How the sequences of a model are spread over ranks."""

    team: Team
    schedule: str
    placement: str
    attention: Callable[..., Any]  # `context_parallel_attention`, which compiled code calls without looking into it

    def __deepcopy__(self, memo: Any) -> Spread:
        """The ranks stay the same when a model is copied."""
        return self

    def attend(self, module: nn.Module, nodes: tuple[Tensor, Tensor, Tensor], mask: Any, **how: Any) -> Any:
        """`context_parallel_attention` for a layer of a model, from query, key and value and what `shard_batch` said.

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
        if how["window"] is not None and not how["is_causal"]:
            raise NotImplementedError(f"{type(module).__name__} has a window on both sides, which ranks can't do yet")
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

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def remove(self) -> None:
        """Make the model work alone again."""
        for module in self.model.modules():
            vars(module).pop(RANKS, None)


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
            that mix nodes without attention.
        The forward raises ValueError for a batch that isn't from `shard_batch`.
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
    spread = Spread(Team(group), schedule, placement, torch.compiler.disable(context_parallel_attention))
    for module in model.modules():
        setattr(module, RANKS, spread)
    return Handle(model)


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
            without holes, position_ids (B, L) (packed documents begin where they don't rise), labels (B, L) as
            transformers wants them, times (L,) or (B, L) for `take_times`.
        group: as in `parallelize_context`.
        placement: as in `parallelize_context`.

    Returns:
        Keyword arguments of the model: input_ids, position_ids, attention_mask (which says what each query sees of the
        whole sequence; models hand it on as it is), and with labels also labels, shift_labels, num_items_in_batch.

    Raises:
        ValueError: a shape is wrong, the mask has holes, or the batch has something that can't be cut.
        TypeError: a type or dtype is wrong.
    """
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

    def own(x: Tensor, dim: int = 1) -> Tensor:
        return shard_sequence(x, dim, group=group, placement=placement)

    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    part = {
        "input_ids": own(ids),
        "position_ids": own(positions),
        "attention_mask": masks.mark_whole(own(_visible(batch, ids))),
    }
    if "labels" in batch:
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        part["labels"] = part["shift_labels"] = own(labels)
        part["num_items_in_batch"] = (labels != IGNORED).sum() / Team(group).size
    if "times" in batch:
        part["times"] = own(batch["times"], -1)
    return part


def _visible(batch: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """The nodes (B, L, 2) that padding and packed documents let each query see."""
    length = ids.shape[1]
    seen = iv.everything(length, ids.device).expand(len(ids), length, -1)
    if "attention_mask" in batch:
        real, contiguous = iv.of_mask(batch["attention_mask"].bool())
        if not contiguous:
            raise ValueError("attention_mask must have no holes, each row one run of ones")
        seen = iv.intersect(seen, real.unsqueeze(1))
    if "position_ids" in batch:
        upward = iv.intersect(seen, iv.around(iv.standing(length, length, ids.device), None, 0))
        begins = masks.of_position_ids(batch["position_ids"], upward, 0)[0][..., 0].contiguous()
        ends = torch.searchsorted(begins, begins, right=True)
        seen = iv.intersect(seen, torch.stack([begins, ends], dim=-1))
    return seen
