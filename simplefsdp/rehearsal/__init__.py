"""Rehearse a cluster on one device: see ``simplefsdp.rehearsal.group``."""

from .group import Collective, World, world

__all__ = ["Collective", "World", "world"]
