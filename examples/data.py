"""Text as bytes: one token a byte, whole files held out for validation."""

import glob
import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def find_files(pattern: str | None) -> list[Path]:
    """Files named by a path, a folder or a glob; ``None``: the sources of Python's standard library."""
    if pattern is None:
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "test", "tests"}
        return sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    if Path(pattern).is_dir():
        return sorted(p for p in Path(pattern).rglob("*") if p.is_file())
    return sorted(Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file())


def load(pattern: str | None, seq_len: int) -> tuple[Tensor, Tensor]:
    """Training and validation text, uint8: every 20th file is held out; of a single file, its last twentieth."""
    files = find_files(pattern)
    texts = [p.read_bytes() for p in files]
    if len(texts) == 1:
        cut = len(texts[0]) * 19 // 20
        train, held_out = texts[0][:cut], texts[0][cut:]
    else:
        train = b"".join(text for i, text in enumerate(texts) if i % 20 != 19)
        held_out = b"".join(text for i, text in enumerate(texts) if i % 20 == 19)
    for name, text in (("training", train), ("validation", held_out)):
        if len(text) <= seq_len:
            raise SystemExit(
                f"--data {pattern}: {len(files)} files leave {len(text)} bytes of {name} text, "
                f"--seq-len {seq_len} needs more"
            )
    return _tensor(train), _tensor(held_out)


def crops(text: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, int64, both (len(starts), seq_len)."""
    window = text[starts[:, None] + torch.arange(seq_len + 1)].long()
    return window[:, :-1], window[:, 1:]


def random_crops(text: Tensor, number: int, seq_len: int, *seed: int) -> tuple[Tensor, Tensor]:
    """``crops`` from anywhere, a function of ``seed``; the first ones do not depend on how many follow."""
    generator = torch.Generator().manual_seed(hash(seed))
    return crops(text, torch.randint(len(text) - seq_len, (number,), generator=generator), seq_len)


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
