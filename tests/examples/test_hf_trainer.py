"""HuggingFace's Trainer with a sharded model, as a user starts it: on two ranks through torchrun."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import torchrun

transformers = pytest.importorskip("transformers")

from examples.hf_trainer import Sequences  # noqa: E402
from tests.examples.test_hf_causal_lm import small  # noqa: E402

SEQ_LEN = 16


@pytest.mark.slow
def test_the_trainer_trains_and_resumes_as_it_trains_in_a_single_process(tmp_path: Path) -> None:
    small(tied=True).config.save_pretrained(tmp_path / "model")
    flags = ["--model", str(tmp_path / "model"), "--batch-size", "2", "--accumulate", "2", "--seq-len", str(SEQ_LEN)]
    launch = ["-m", "examples.hf_trainer", *flags, "--sequences", "48", "--lower-with", "aot_eager"]
    torchrun(*launch, "--out", str(tmp_path / "first"), "--steps", "2")
    saved = tmp_path / "first" / "checkpoint-2"
    torchrun(*launch, "--out", str(tmp_path / "second"), "--steps", "4", "--resume", str(saved))
    folder = tmp_path / "second" / "checkpoint-4"

    expected, losses = in_a_single_process(tmp_path)
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert [entry["loss"] for entry in log if "loss" in entry] == pytest.approx(losses, abs=1e-3)
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=1e-4, msg=name)


def in_a_single_process(folder: Path) -> tuple[Any, list[float]]:
    """Return the model and the losses of four steps of the same eight sequences each."""
    arguments = transformers.TrainingArguments(
        str(folder / "single"),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        report_to=[],
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder / "model"), dtype=torch.float32
    )
    trainer = transformers.Trainer(model, args=arguments, train_dataset=Sequences(48, SEQ_LEN))
    trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
