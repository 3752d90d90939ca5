"""Configurations for torchtitan's ``--config``, with ``--module examples.torchtitan``."""

from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.trainer import Trainer

from . import with_simple_fsdp


def llama3_debugmodel() -> Trainer.Config:
    return with_simple_fsdp(llama3.llama3_debugmodel())


def llama3_8b() -> Trainer.Config:
    return with_simple_fsdp(llama3.llama3_8b())


def llama3_70b() -> Trainer.Config:
    return with_simple_fsdp(llama3.llama3_70b())
