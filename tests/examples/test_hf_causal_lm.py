"""HuggingFace's folders: weights in, a step, weights out."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import torchrun
from tests.simplefsdp.frontend.test_huggingface import SMALL

transformers = pytest.importorskip("transformers")

from examples import data, hf_causal_lm  # noqa: E402

SEQ_LEN = 16


def small(tied: bool) -> Any:
    shape = SMALL | {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 256}
    config = transformers.LlamaConfig(**shape, tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.slow
def test_a_local_model_is_trained_and_saved(tmp_path: Path) -> None:
    model, trained = tmp_path / "model", tmp_path / "trained"
    torch.manual_seed(1)
    whole = small(tied=True)
    whole.save_pretrained(model)
    flags = ["--model", str(model), "--out", str(trained), "--seq-len", str(SEQ_LEN), "--lower-with", "aot_eager"]
    printed = torchrun("-m", "examples.hf_causal_lm", *flags, "--steps", "5", "--lr", "1e-2")
    found = re.search(r"^losses (\S+) (\S+); saved in", printed, re.MULTILINE)
    assert found
    text, _ = data.load(None, SEQ_LEN)
    tokens, _ = data.random_crops(text, 4, SEQ_LEN, 0, 0, 0)
    expected = whole(input_ids=tokens, labels=tokens).loss.item()
    assert abs(float(found[1]) - expected) < 1e-3
    assert float(found[2]) < float(found[1]) - 1
    again = transformers.AutoModelForCausalLM.from_pretrained(trained)
    assert again(input_ids=tokens, labels=tokens).loss.item() < expected - 1
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_without_weights_they_are_drawn(tmp_path: Path) -> None:
    small(tied=False).config.save_pretrained(tmp_path)
    torch.manual_seed(3)
    drawn = hf_causal_lm.load_whole(tmp_path)
    torch.manual_seed(3)
    assert torch.equal(drawn.lm_head.weight, small(tied=False).lm_head.weight)


def test_a_tokenizer_is_used_where_there_is_one(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ab ba " * 100)
    args = argparse.Namespace(model=tmp_path / "model", data=str(text), seq_len=5)
    args.model.mkdir()
    assert hf_causal_lm.tokens_of(args)[:3].tolist() == list(b"ab ")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"ab": 0, "ba": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(args.model)
    assert hf_causal_lm.tokens_of(args)[:4].tolist() == [0, 1, 0, 1]
