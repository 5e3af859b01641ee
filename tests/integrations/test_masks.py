"""The masks of transformers as intervals: the direct way must say what transformers' own dense mask says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    find_packed_sequence_indices,
    or_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from continuous_attention import intervals as iv
from continuous_attention.integrations import masks

LENGTH = 9
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8]])


def packed(function: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers puts it together for packed position_ids."""
    documents = find_packed_sequence_indices(POSITIONS)
    assert documents is not None
    return and_masks(remap_positions_for_packed_sequence(function, POSITIONS), packed_sequence_mask_function(documents))


FUNCTIONS = {
    "causal": causal_mask_function,
    "bidirectional": bidirectional_mask_function,
    "window": sliding_window_causal_mask_function(3),
    "window of one": sliding_window_causal_mask_function(1),
    "bidirectional window": sliding_window_bidirectional_mask_function(2),
    "chunks": chunked_causal_mask_function(4, torch.tensor([0, 3])),
    "packed": packed(causal_mask_function),
    "packed, window": packed(sliding_window_causal_mask_function(2)),
}
PADDINGS = {
    "no padding": None,
    "nothing padded": [[1] * 9, [1] * 9],
    "right": [[1] * 9, [1] * 5 + [0] * 4],
    "left": [[1] * 9, [0] * 3 + [1] * 6],
    "both sides": [[0] + [1] * 8, [0] * 2 + [1] * 3 + [0] * 4],
    "everything padded": [[1] * 9, [0] * 9],
    "shorter than the cache": [[1] * 6, [0] + [1] * 5],
}
# q_length, kv_length, q_offset, kv_offset
PLACES = {
    "whole": (LENGTH, LENGTH, 0, 0),
    "chunk": (3, 7, 4, 0),
    "decode": (1, LENGTH, LENGTH - 1, 0),
    "static cache": (2, LENGTH, torch.tensor(3), 0),
    "sliding cache": (2, 4, 7, 5),
}


def asked(function: str, padding: str, place: str, **more: Any) -> dict[str, Any]:
    q_length, kv_length, q_offset, kv_offset = PLACES[place]
    mask = PADDINGS[padding]
    return {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[function],
        "attention_mask": None if mask is None else torch.tensor(mask, dtype=torch.bool),
        "device": torch.device("cpu"),
        **more,
    }


def visible(mask: Tensor, request: dict[str, Any]) -> Tensor:
    """The boolean mask (B, Lq, Lk) that was meant."""
    q_length, kv_length = request["q_length"], request["kv_length"]
    if masks.is_plainly_causal(mask, q_length):
        return torch.ones(2, q_length, kv_length, dtype=torch.bool).tril(kv_length - q_length)
    intervals = masks.unmark(mask, q_length)
    assert intervals is not None
    return iv.visible_nodes(intervals, kv_length)


# transformers packs without a cache only.
@pytest.mark.parametrize(
    ("function", "place"), [(f, p) for f in FUNCTIONS for p in PLACES if p == "whole" or not f.startswith("packed")]
)
@pytest.mark.parametrize("padding", PADDINGS)
def test_the_direct_way_says_what_the_dense_mask_says(
    function: str, padding: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asked(function, padding, place)
    dense = sdpa_mask(**request, allow_is_causal_skip=False)
    assert dense is not None
    monkeypatch.setattr(masking_utils, "sdpa_mask", None)  # so that nothing dense can be made
    mask = masks.mask_intervals(**request)
    assert torch.equal(visible(mask, request), dense[:, 0])
    if masks.is_plainly_causal(mask, request["q_length"]):
        assert function == "causal"


def test_plain_causality_needs_no_intervals() -> None:
    for place in PLACES:
        for padding in PADDINGS:
            mask = masks.mask_intervals(**asked("causal", padding, place))
            plain = place in ("whole", "decode") and padding in ("no padding", "nothing padded")
            assert masks.is_plainly_causal(mask, PLACES[place][0]) == plain


@pytest.mark.parametrize("blocks", [[-1, -1, 0, 0, 0, -1, 1, 1, -1], [0, 0, 0, -1, -1, -1, -1, 1, 1]])
def test_image_blocks_go_the_dense_way(blocks: list[int]) -> None:
    ids = torch.tensor([blocks, [-1] * 9])
    request = {
        **asked("causal", "left", "whole"),
        "mask_function": or_masks(causal_mask_function, blockwise_overlay(ids)),
    }
    dense = sdpa_mask(**request, allow_is_causal_skip=False)
    assert dense is not None
    assert torch.equal(visible(masks.mask_intervals(**request), request), dense[:, 0])


def test_functions_of_others_go_the_dense_way() -> None:
    # Its name is one that transformers has, too, and it means something else.
    def causal_mask_function(batch: Tensor, head: Tensor, query: Tensor, node: Tensor) -> Tensor:
        return node >= query

    request = {**asked("causal", "no padding", "whole"), "mask_function": causal_mask_function}
    expected = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu().expand(2, -1, -1)
    assert torch.equal(visible(masks.mask_intervals(**request), request), expected)


def test_a_hole_in_the_padding_stays_a_mask_and_warns() -> None:
    request = asked("causal", "right", "whole")
    request["attention_mask"] = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]] * 2, dtype=torch.bool)
    dense = sdpa_mask(**request, allow_is_causal_skip=False)
    with pytest.warns(UserWarning, match="hole in the padding"):
        mask = masks.mask_intervals(**request)
    assert dense is not None
    assert torch.equal(mask, dense)


def test_a_model_with_attention_of_its_own_is_named() -> None:
    from transformers import BloomConfig
    from transformers.models.bloom import modeling_bloom  # noqa: F401  its source is what counts

    with pytest.raises(NotImplementedError, match="bloom computes attention by itself"):
        masks.mask_intervals(**asked("causal", "no padding", "whole"), config=BloomConfig())
    masks.mask_intervals(**asked("causal", "no padding", "whole"), config=LlamaConfig())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float32])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_no_mask_of_a_user_looks_like_intervals(length: int, dtype: torch.dtype) -> None:
    assert masks.unmark(torch.ones(2, 1, length, length, dtype=dtype), length) is None
    assert masks.unmark(torch.ones(2, 1, length, length, dtype=torch.int64), length) is None


def test_marked_intervals_come_back() -> None:
    intervals = torch.tensor([[[0, 3], [1, 4]]])
    marked = masks.mark(intervals)
    assert marked.shape == (1, 1, 3, 2)
    unmarked = masks.unmark(marked, 2)
    assert unmarked is not None
    assert torch.equal(unmarked, intervals)


class TestDocumentsByPosition:
    def test_positions_may_begin_anywhere(self) -> None:
        cut, packed = masks.of_position_ids(torch.tensor([[3, 4, 5, 3, 4, 1, 1]]), None, 0)
        assert packed
        assert cut[0, :, 0].tolist() == [0, 0, 0, 3, 3, 5, 6]

    def test_a_jump_ahead_begins_none(self) -> None:
        cut, packed = masks.of_position_ids(torch.tensor([[0, 1, 5, 6]]), None, 0)
        assert not packed
        assert cut[0, :, 0].tolist() == [0] * 4

    def test_a_position_zero_begins_one(self) -> None:
        cut, packed = masks.of_position_ids(POSITIONS, None, 0)
        assert packed
        assert cut[0, :, 0].tolist() == [0, 0, 0, 0, 4, 4, 4, 7, 7]
        assert cut[1, :, 0].tolist() == [0] * 9

    def test_in_a_filled_cache_it_begins_behind_the_nodes_before(self) -> None:
        cut, packed = masks.of_position_ids(torch.tensor([[5, 6, 0, 1]]), None, 5)
        assert packed
        assert cut[0, :, 0].tolist() == [0, 0, 7, 7]

    @pytest.mark.parametrize("positions", [[0, 0, 0, 0, 1, 2], [1, 1, 1, 0, 1, 2]])
    def test_left_padding_begins_none(self, positions: list[int]) -> None:
        run = torch.tensor([[[3, q + 1] for q in range(6)]])
        cut, _ = masks.of_position_ids(torch.tensor([positions]), run, 0)
        assert torch.equal(iv.visible_nodes(iv.intersect(run, cut), 6), iv.visible_nodes(run, 6))
