"""Models of HuggingFace transformers, built from a configuration: five steps as in a single process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simplefsdp import simple_fsdp
from tests.compare import same_steps
from tests.ranks import Ranks

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 31,
    "max_position_embeddings": 32,
}
CONFIGS: dict[str, Any] = {
    "Llama, tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "Qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=4, tie_word_embeddings=True),
    "Mixtral": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.0, tie_word_embeddings=True
    ),
    "GPT-2": lambda: transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, n_positions=32, vocab_size=31, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "BERT": lambda: transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        vocab_size=31,
        max_position_embeddings=32,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    ),
}


class Logits(nn.Module):
    """The logits of a language model, from tokens alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        config = CONFIGS[kind]()
        auto = transformers.AutoModelForMaskedLM if kind == "BERT" else transformers.AutoModelForCausalLM
        self.model = auto.from_config(config, attn_implementation="eager")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(1000 * step + rank))


@pytest.mark.parametrize("lowering", ["eager", "auto"])
@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("BERT", "Mixtral"))) for name in CONFIGS]
)
def test_huggingface_models_train_as_in_a_single_process(two_ranks: Ranks, kind: str, lowering: str) -> None:
    two_ranks.run(_trains, kind, lowering)


@pytest.mark.usefixtures("one_of_four")
def test_methods_that_need_whole_weights_say_what_to_do(tmp_path: Path) -> None:
    config = CONFIGS["Llama, tied"]()
    model = simple_fsdp(transformers.AutoModelForCausalLM.from_config(config))
    for given in ({}, {"state_dict": model.state_dict()}):
        with pytest.raises(ValueError, match=r"save_pretrained: .*shards.*full_state_dict.*state_dict=state"):
            model.save_pretrained(tmp_path, **given)
    with pytest.raises(RuntimeError, match=r"resize_token_embeddings: .*shards; resize before simple_fsdp"):
        model.resize_token_embeddings(40)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    model.save_pretrained(tmp_path, state_dict=transformers.AutoModelForCausalLM.from_config(config).state_dict())
    assert (tmp_path / "model.safetensors").exists()


def _trains(kind: str, lowering: str) -> None:
    def wrap(model: Any) -> nn.Module:
        simple_fsdp(model)
        model.model.tie_weights()  # changes nothing
        return model

    model: Any = same_steps(lambda: Logits(kind), lowering, wrap=wrap, inputs=tokens)
    embedding, head = model.model.get_input_embeddings(), model.model.get_output_embeddings()
    assert embedding.weight is head.weight
