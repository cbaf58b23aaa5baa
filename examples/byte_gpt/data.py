"""The text: the source of this machine's own Python standard library, or one file; a byte is a
token."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
LEAST_NBYTES = 10_000_000  # of the standard library; a smaller one is a stripped installation
EVERY = 20  # one document in so many is for validation: each part of the library is in both


@dataclass(frozen=True)
class Text:
    """A text cut into two that share no document."""

    name: str
    train: Tensor  # uint8, 1-D
    validation: Tensor  # uint8, 1-D

    @property
    def nbytes(self) -> int:
        return self.train.numel() + self.validation.numel()

    def order0_bits_per_byte(self) -> float:
        """What a model that knows only how often each byte occurs needs: the entropy of the
        counts."""
        # [VOCAB_SIZE]
        counts = torch.bincount(torch.cat((self.train, self.validation)), minlength=VOCAB_SIZE)
        shares = counts[counts > 0] / self.nbytes
        return float(-(shares * shares.log2()).sum())


def load(path: Path | None, *, seq_length: int) -> Text:
    """The user's file, or the standard library where there is none."""
    documents = _pieces(path.read_bytes()) if path else _standard_library()
    validation = b"".join(documents[EVERY - 1 :: EVERY])
    train = b"".join(
        document for index, document in enumerate(documents) if index % EVERY != EVERY - 1
    )
    if len(validation) <= seq_length:
        least = EVERY * (seq_length + 1)
        raise ValueError(
            f"Invalid text: {path} has {len(train) + len(validation)} bytes. Must have at least "
            f"{least}."
        )
    return Text(
        str(path or "the Python standard library"), _as_tensor(train), _as_tensor(validation)
    )


def training_batches(
    text: Text, *, seed: int, rank: int, shape: tuple[int, int]
) -> Iterator[Tensor]:
    """Endless random windows of the training text, others on each rank, the same ones for the same
    seed."""
    batch, length = shape
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    while True:
        starts = torch.randint(text.train.numel() - length, (batch,), generator=generator)
        # [batch, length + 1]
        yield torch.stack([text.train[start : start + length + 1] for start in starts]).long()


def validation_batches(
    text: Text, *, windows: int, rank: int, ranks: int, shape: tuple[int, int]
) -> Iterator[Tensor]:
    """Evenly spaced windows of the validation text; each is read by one rank."""
    batch, length = shape
    starts = torch.linspace(0, text.validation.numel() - length - 1, windows).long()[rank::ranks]
    for chosen in torch.split(starts, batch):
        yield torch.stack([text.validation[start : start + length + 1] for start in chosen]).long()


def _standard_library() -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        path
        for path in root.rglob("*.py")
        if path.is_file() and not _is_installed_later(path, root)
    )
    documents = [path.read_bytes() for path in paths]
    nbytes = sum(map(len, documents))
    if nbytes < LEAST_NBYTES:
        raise ValueError(
            f"Invalid standard library: {root} holds {nbytes} bytes of Python source. "
            f"Must hold at least {LEAST_NBYTES}. Give a text of your own: --data FILE."
        )
    return documents


def _is_installed_later(path: Path, root: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(path.relative_to(root).parts))


def _pieces(content: bytes) -> list[bytes]:
    """Twenty runs of `EVERY` pieces of one file, so that its validation part comes from all over
    it."""
    piece_nbytes = max(1, -(-len(content) // EVERY))
    return [content[start : start + piece_nbytes] for start in range(0, len(content), piece_nbytes)]


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
