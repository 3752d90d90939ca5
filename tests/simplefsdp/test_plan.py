"""Requests resolved against the parameters of a model."""

import hypothesis.strategies as st
from hypothesis import given

from simplefsdp.plan import block_buckets, blocks, single_buckets

PARTS = st.sampled_from(["layers", "0", "1", "weight", "norm"])
FQNS = st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), unique=True).map(tuple)


def test_a_llama_has_a_bucket_before_the_blocks_one_for_each_and_one_after():
    fqns = (
        "tok.weight",
        "layers.0.wq.weight",
        "layers.0.norm.weight",
        "layers.1.wq.weight",
        "norm.weight",
        "out.weight",
    )
    assert block_buckets(fqns) == (fqns[:1], fqns[1:3], fqns[3:4], fqns[4:])
    assert blocks(fqns) == ["layers.0", "layers.1"]


def test_two_stacks_of_blocks_are_told_apart_and_nested_numbers_belong_to_the_outer_block():
    fqns = ("encoder.0.mlp.0.weight", "encoder.0.mlp.1.weight", "middle", "decoder.0.weight", "decoder.1.weight")
    assert block_buckets(fqns) == (fqns[:2], fqns[2:3], fqns[3:4], fqns[4:])


@given(FQNS)
def test_every_parameter_is_in_one_bucket_in_registration_order(fqns):
    for buckets in (block_buckets(fqns), single_buckets(fqns)):
        assert tuple(fqn for bucket in buckets for fqn in bucket) == fqns
    assert all(len(bucket) == 1 for bucket in single_buckets(fqns))
