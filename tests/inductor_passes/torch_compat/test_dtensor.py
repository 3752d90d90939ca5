"""Meshes in the keys of torch's compile caches."""

import pickle

import pytest
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.torch_compat.dtensor import meshes_pickled_without_hash


@pytest.mark.usefixtures("one_of_four")
def test_a_mesh_is_pickled_as_before_it_was_hashed() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with meshes_pickled_without_hash():
        before = pickle.dumps(mesh)
        hash(mesh)  # is kept by the mesh
        assert pickle.dumps(mesh) == before
        assert pickle.loads(before) == mesh
    assert pickle.dumps(mesh) != before
