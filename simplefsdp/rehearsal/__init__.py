"""Rehearse a cluster on one device: see ``simplefsdp.rehearsal.group``."""

from simplefsdp.rehearsal.group import Collective, World, world

__all__ = ["Collective", "World", "world"]
