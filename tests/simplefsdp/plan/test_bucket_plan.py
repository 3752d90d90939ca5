"""Requests resolved against the parameters of a model, and plans as files."""

import json
import re
from dataclasses import replace

import expecttest
import hypothesis.strategies as st
import pytest
from hypothesis import given

from inductor_passes.scheduling.issue_points import Bucket
from simplefsdp import BucketPlan, manual_plan
from simplefsdp.plan.bucket_plan import GraphUses, WireFormats
from simplefsdp.plan.grouping import block_buckets, blocks, resolve_plan

PARTS = st.sampled_from(["layers", "0", "1", "weight", "norm"])
FQNS = st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), unique=True).map(tuple)
LLAMA = (
    "tok.weight",
    "layers.0.wq.weight",
    "layers.0.norm.weight",
    "layers.1.wq.weight",
    "norm.weight",
    "out.weight",
)


def test_a_llama_has_a_bucket_before_the_blocks_one_for_each_and_one_after():
    assert block_buckets(LLAMA) == (LLAMA[:1], LLAMA[1:3], LLAMA[3:4], LLAMA[4:])
    assert blocks(LLAMA) == ["layers.0", "layers.1"]


def test_two_stacks_of_blocks_are_told_apart_and_nested_numbers_belong_to_the_outer_block():
    fqns = ("encoder.0.mlp.0.weight", "encoder.0.mlp.1.weight", "middle", "decoder.0.weight", "decoder.1.weight")
    assert block_buckets(fqns) == (fqns[:2], fqns[2:3], fqns[3:4], fqns[4:])


@given(FQNS)
def test_every_parameter_is_in_one_bucket_in_registration_order(fqns):
    assert tuple(fqn for bucket in block_buckets(fqns) for fqn in bucket) == fqns


def test_patterns_name_modules_and_parameters():
    def buckets(*wrap):
        return manual_plan(wrap).buckets(LLAMA)

    assert buckets("tok", "layers.*", ["norm", "out"]) == block_buckets(LLAMA)
    assert buckets("*") == (LLAMA[:1], LLAMA[1:4], LLAMA[4:5], LLAMA[5:])
    assert buckets(["*"]) == (LLAMA,)
    assert buckets("tok", ["layers.*.norm", "layers.1"], "layers.0.wq.weight", ["norm.*", "ou?"]) == (
        LLAMA[:1],
        LLAMA[1:2],
        LLAMA[2:4],
        LLAMA[4:],
    )


def test_parameters_that_no_pattern_names_get_a_bucket_each_and_a_warning(caplog):
    expected = (LLAMA[:1], LLAMA[1:3], LLAMA[3:4], LLAMA[4:5], LLAMA[5:])
    assert manual_plan(["layers.*"]).buckets(LLAMA) == expected
    assert "no pattern names tok.weight, norm.weight, out.weight" in caplog.text


@pytest.mark.parametrize(
    ("wrap", "prefetch", "error", "message"),
    [
        ("layers.*", 1, TypeError, "expected a list of patterns and lists of patterns, found 'layers.*'"),
        ([3], 1, TypeError, "expected a pattern or a list of patterns, found 3"),
        ([["tok", None]], 1, TypeError, "expected a pattern or a list of patterns, found ['tok', None]"),
        ([[]], 1, ValueError, "expected a pattern or a list of patterns, found []"),
        ([""], 1, ValueError, "expected a pattern or a list of patterns, found ''"),
        (["a"], -1, ValueError, "prefetch=-1: expected 0 or more"),
        (["a"], 1.5, TypeError, "prefetch: expected a number of buckets, found 1.5"),
        (["layer.*"], 1, ValueError, "unknown pattern 'layer.*'; did you mean 'layers"),
        (["layers.*", "layers.0.norm"], 1, ValueError, "layers.0.norm.weight is named by both 'layers.*' and"),
    ],
)
def test_bad_manual_plans_are_named(wrap, prefetch, error, message):
    with pytest.raises(error, match=re.escape(message)):
        manual_plan(wrap, prefetch=prefetch).buckets(LLAMA)


def plan(prefetch: int = 1, has_all_reduce: bool = False) -> BucketPlan:
    uses = GraphUses(LLAMA, LLAMA[:0:-1], LLAMA[::-1], frozenset(LLAMA if has_all_reduce else ()))
    return resolve_plan(prefetch, block_buckets(LLAMA), uses, [(fqn, (4, i)) for i, fqn in enumerate(LLAMA)], LLAMA[:1])


class TestResolved(expecttest.TestCase):
    def test_plan_with_a_prefetch_of_one_bucket(self):
        self.assertExpectedInline(
            plan().explain(),
            """\
plan e0db2f9c5e691d12: 6 parameters, 60 elements; 4 gathers in forward, 3 in backward, 4 reductions; 1 kept unsharded
forward:
    0.0%  tok.weight: issued at the start, awaited before tok.weight is
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued before tok.weight is used, awaited before layers.0.wq.weight is
   20.0%  layers.1.wq.weight: issued before layers.0.wq.weight is used, awaited before layers.1.wq.weight is
   60.0%  norm.weight .. out.weight (2): issued before layers.1.wq.weight is used, awaited before norm.weight is
backward:
   60.0%  norm.weight .. out.weight (2): issued at the start, awaited before out.weight is
   20.0%  layers.1.wq.weight: issued before out.weight is used, awaited before layers.1.wq.weight is
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued before layers.1.wq.weight is used, awaited before layers.0.norm.weight is
reductions:
   60.0%  norm.weight .. out.weight (2): issued when complete, awaited before that of layers.1.wq.weight
   20.0%  layers.1.wq.weight: issued when complete, awaited before that of layers.0.wq.weight
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued when complete, awaited before that of tok.weight
    0.0%  tok.weight: issued when complete, awaited at the end""",
        )

    def test_an_all_reduce_behind_the_reduce_scatter(self):
        self.assertExpectedInline(
            plan(has_all_reduce=True).explain(),
            """\
plan 5b710e4e049da350: 6 parameters, 60 elements; 4 gathers in forward, 3 in backward, 4 reductions; 1 kept unsharded
forward:
    0.0%  tok.weight: issued at the start, awaited before tok.weight is
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued before tok.weight is used, awaited before layers.0.wq.weight is
   20.0%  layers.1.wq.weight: issued before layers.0.wq.weight is used, awaited before layers.1.wq.weight is
   60.0%  norm.weight .. out.weight (2): issued before layers.1.wq.weight is used, awaited before norm.weight is
backward:
   60.0%  norm.weight .. out.weight (2): issued at the start, awaited before out.weight is
   20.0%  layers.1.wq.weight: issued before out.weight is used, awaited before layers.1.wq.weight is
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued before layers.1.wq.weight is used, awaited before layers.0.norm.weight is
reductions:
   60.0%  norm.weight .. out.weight (2): issued when complete, all-reduced before that of layers.1.wq.weight, awaited before that of layers.0.wq.weight
   20.0%  layers.1.wq.weight: issued when complete, all-reduced before that of layers.0.wq.weight, awaited before that of tok.weight
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued when complete, all-reduced before that of tok.weight, awaited at the end
    0.0%  tok.weight: issued when complete, awaited at the end""",
        )

    def test_plan_with_a_prefetch_of_two_buckets(self):
        self.assertExpectedInline(
            plan(prefetch=2).explain(),
            """\
plan bab66194fb901882: 6 parameters, 60 elements; 4 gathers in forward, 3 in backward, 4 reductions; 1 kept unsharded
forward:
    0.0%  tok.weight: issued at the start, awaited before tok.weight is
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued at the start, awaited before layers.0.wq.weight is
   20.0%  layers.1.wq.weight: issued before tok.weight is used, awaited before layers.1.wq.weight is
   60.0%  norm.weight .. out.weight (2): issued before layers.0.wq.weight is used, awaited before norm.weight is
backward:
   60.0%  norm.weight .. out.weight (2): issued at the start, awaited before out.weight is
   20.0%  layers.1.wq.weight: issued at the start, awaited before layers.1.wq.weight is
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued before out.weight is used, awaited before layers.0.norm.weight is
reductions:
   60.0%  norm.weight .. out.weight (2): issued when complete, awaited before that of layers.0.wq.weight
   20.0%  layers.1.wq.weight: issued when complete, awaited before that of tok.weight
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued when complete, awaited at the end
    0.0%  tok.weight: issued when complete, awaited at the end""",
        )

    def test_plan_without_prefetch(self):
        self.assertExpectedInline(
            plan(prefetch=0).explain(),
            """\
plan ede322ac165ce274: 6 parameters, 60 elements; 4 gathers in forward, 3 in backward, 4 reductions; 1 kept unsharded
forward:
    0.0%  tok.weight: issued and awaited before tok.weight is used
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued and awaited before layers.0.wq.weight is used
   20.0%  layers.1.wq.weight: issued and awaited before layers.1.wq.weight is used
   60.0%  norm.weight .. out.weight (2): issued and awaited before norm.weight is used
backward:
   60.0%  norm.weight .. out.weight (2): issued and awaited before out.weight is used
   20.0%  layers.1.wq.weight: issued and awaited before layers.1.wq.weight is used
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued and awaited before layers.0.norm.weight is used
reductions:
   60.0%  norm.weight .. out.weight (2): issued when complete, awaited at once
   20.0%  layers.1.wq.weight: issued when complete, awaited at once
   20.0%  layers.0.wq.weight .. layers.0.norm.weight (2): issued when complete, awaited at once
    0.0%  tok.weight: issued when complete, awaited at once""",
        )

    def test_plan_as_a_file(self):
        self.assertExpectedInline(
            plan().to_json(),
            """\
{
 "version": 2,
 "hash": "e0db2f9c5e691d12",
 "parameters": {
  "tok.weight": [4, 0],
  "layers.0.wq.weight": [4, 1],
  "layers.0.norm.weight": [4, 2],
  "layers.1.wq.weight": [4, 3],
  "norm.weight": [4, 4],
  "out.weight": [4, 5]
 },
 "keep_unsharded": [
  "tok.weight"
 ],
 "forward": [
  {
   "parameters": [
    "tok.weight"
   ],
   "issue": null,
   "wait": "tok.weight"
  },
  {
   "parameters": [
    "layers.0.wq.weight",
    "layers.0.norm.weight"
   ],
   "issue": "tok.weight",
   "wait": "layers.0.wq.weight"
  },
  {
   "parameters": [
    "layers.1.wq.weight"
   ],
   "issue": "layers.0.wq.weight",
   "wait": "layers.1.wq.weight"
  },
  {
   "parameters": [
    "norm.weight",
    "out.weight"
   ],
   "issue": "layers.1.wq.weight",
   "wait": "norm.weight"
  }
 ],
 "backward": [
  {
   "parameters": [
    "norm.weight",
    "out.weight"
   ],
   "issue": null,
   "wait": "out.weight"
  },
  {
   "parameters": [
    "layers.1.wq.weight"
   ],
   "issue": "out.weight",
   "wait": "layers.1.wq.weight"
  },
  {
   "parameters": [
    "layers.0.wq.weight",
    "layers.0.norm.weight"
   ],
   "issue": "layers.1.wq.weight",
   "wait": "layers.0.norm.weight"
  }
 ],
 "reductions": [
  {
   "parameters": [
    "norm.weight",
    "out.weight"
   ],
   "issue": "norm.weight",
   "wait": "layers.1.wq.weight"
  },
  {
   "parameters": [
    "layers.1.wq.weight"
   ],
   "issue": "layers.1.wq.weight",
   "wait": "layers.0.wq.weight"
  },
  {
   "parameters": [
    "layers.0.wq.weight",
    "layers.0.norm.weight"
   ],
   "issue": "layers.0.wq.weight",
   "wait": "tok.weight"
  },
  {
   "parameters": [
    "tok.weight"
   ],
   "issue": "tok.weight",
   "wait": null
  }
 ]
}
""",
        )


def test_a_saved_plan_is_the_same_when_loaded(tmp_path):
    for original in (plan(), plan(has_all_reduce=True), plan(prefetch=0)):
        original.save(tmp_path / "plan.json")
        loaded = BucketPlan.load(tmp_path / "plan.json")
        assert loaded == original
        assert loaded.hash == original.hash
    assert len({plan().hash, plan(has_all_reduce=True).hash, plan(prefetch=0).hash}) == 3


def test_packing_order_and_order_of_use_are_not_the_same():
    uses = GraphUses(LLAMA[::-1], (), LLAMA, frozenset())
    resolved = resolve_plan(1, (LLAMA[:3], LLAMA[3:]), uses, (), ())
    assert resolved.forward == (
        Bucket(LLAMA[3:], None, "out.weight"),
        Bucket(LLAMA[:3], "out.weight", LLAMA[2], position=1),
    )
    assert resolved.reductions == (Bucket(LLAMA[:3], LLAMA[2], LLAMA[5]), Bucket(LLAMA[3:], LLAMA[5], None, position=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version: expected 2, found 1"),
        ({"forwards": []}, "unknown field 'forwards'; did you mean 'forward'?"),
        ({"parameters": ["a"]}, "parameters: expected an object of shapes"),
        ({"parameters": {"a": [1.5]}}, "parameters.a: expected a list of sizes, found [1.5]"),
        ({"keep_unsharded": ["b"]}, "keep_unsharded: expected FQNs of parameters, found 'b'"),
        ({"forward": None}, "forward: expected a list of buckets, found None"),
        ({"forward": [["a"]]}, "forward[0]: expected an object"),
        ({"forward": [{"parameters": ["a"], "isue": None}]}, "forward[0]: unknown field 'isue'; did you mean 'issue'?"),
        ({"forward": [{"parameters": []}]}, "forward[0].parameters: expected at least one FQN"),
        (
            {"backward": [{"parameters": ["a"], "wait": "c"}]},
            "backward[0].wait: expected an FQN of a parameter, or null",
        ),
        ({"reductions": [{"parameters": ["a"]}, {"parameters": ["a"]}]}, "reductions: expected each FQN once"),
        ({"wire": [["a", "int8", None]]}, "wire: expected an object of formats"),
        ({"wire": {"b": ["int8", None]}}, "wire: expected FQNs of parameters, found 'b'"),
        ({"wire": {"a": "int8"}}, "wire.a: expected a format, or null, for the gather, one for the reduction, and"),
        ({"wire": {"a": ["int4", None]}}, "wire.a: expected one of bf16, fp8, int8, or null, found 'int4'"),
    ],
)
def test_bad_files_are_named_by_field(tmp_path, change, message):
    good = {
        "version": 2,
        "parameters": {"a": [2]},
        "keep_unsharded": [],
        "forward": [],
        "backward": [],
        "reductions": [],
    }
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(good))
    BucketPlan.load(path)
    path.write_text(json.dumps(good | change))
    with pytest.raises(ValueError, match=re.escape(f"plan.json: {message}")):
        BucketPlan.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json: not JSON"):
        BucketPlan.load(path)


def test_a_plan_for_another_model_lists_every_parameter_that_does_not_match():
    fits = dict(plan().parameters)
    plan().check_fits(fits, LLAMA[:1], LLAMA)
    other = {**fits, "norm.weight": (7,), "new.weight": (1,)}
    del other["tok.weight"]
    with pytest.raises(ValueError, match="does not fit this model") as error:
        plan().check_fits(other, ["out.weight"], other)
    assert str(error.value).splitlines()[1:] == [
        "  new.weight: not in the plan",
        "  tok.weight: not in the model",
        "  norm.weight: shape (4, 4) in the plan, (7,) in the model",
        "  out.weight: resharded after forward in the plan, not in the model (reshard_after_forward)",
    ]


def test_wire_formats_are_part_of_a_plan(tmp_path):
    formats = (WireFormats("tok.weight", "fp8", None), WireFormats("norm.weight", "int8", "int4-hadamard", "int4"))
    narrow = replace(plan(), wire=formats)
    assert narrow.hash != plan().hash
    narrow.save(tmp_path / "plan.json")
    assert BucketPlan.load(tmp_path / "plan.json") == narrow
    assert "sent as fp8" in narrow.explain()
    assert "sent as int4-hadamard" in narrow.explain()
    assert "sent as" not in plan().explain()
    fits = dict(plan().parameters)
    narrow.check_fits(fits, LLAMA[:1], LLAMA, formats)
    plan().check_fits(fits, LLAMA[:1], LLAMA, formats, may_drop=True)
    for one, of_model in ((plan(), formats), (narrow, formats[:1]), (narrow, ())):
        with pytest.raises(ValueError, match=r"norm.weight: travels as .* in the plan, as .* in the model \(wire\)"):
            one.check_fits(fits, LLAMA[:1], LLAMA, of_model)
    with pytest.raises(ValueError, match=r"tok.weight: travels as \('fp8', None\) in the plan, as None in the model"):
        narrow.check_fits(fits, LLAMA[:1], LLAMA, (), may_drop=True)
    mild = replace(narrow, wire=(WireFormats("tok.weight", "bf16"), formats[1]._replace(reduce="bf16-fp32sum")))
    with pytest.raises(ValueError, match=r"norm\.weight: travels as"):
        mild.check_fits(fits, LLAMA[:1], LLAMA, formats, may_drop=True)
    milder = replace(mild, wire=(mild.wire[0], mild.wire[1]._replace(between_nodes="bf16-fp32sum", gather="bf16")))
    milder.check_fits(fits, LLAMA[:1], LLAMA, formats, may_drop=True)
    with pytest.raises(ValueError, match=r"tok\.weight: travels as"):
        milder.check_fits(fits, LLAMA[:1], LLAMA, formats)
    one_step = replace(narrow, wire=(formats[0], formats[1]._replace(between_nodes=None)))
    with pytest.raises(ValueError, match=r"norm\.weight: travels as"):
        one_step.check_fits(fits, LLAMA[:1], LLAMA, formats, may_drop=True)


@pytest.mark.parametrize(
    ("forward", "reductions", "message"),
    [
        ([Bucket(("a",), "b", "a")], [], "forward[0].issue: b is used after a, of this bucket"),
        ([Bucket(("a",), "a", "b")], [], "forward[0].wait: b is used after a, of this bucket"),
        ([Bucket(("b",), "b", "a")], [], "forward[0]: b, its issue point, is used after its wait point"),
        ([], [Bucket(("a",), "a", "a"), Bucket(("b",), "b", "a")], "reductions[1]: its points come before"),
        (
            [],
            [Bucket(("a",), "a", "a", all_reduce_after="b"), Bucket(("b",), "b", "b")],
            "reductions[0]: its points come before",
        ),
    ],
)
def test_points_that_cannot_be_are_named(forward, reductions, message):
    shapes = (("a", (1,)), ("b", (1,)))
    plan = BucketPlan(tuple(forward), (), tuple(reductions), (), shapes)
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.check_order(GraphUses(["a", "b"], [], ["a", "b"], frozenset()))
    BucketPlan((Bucket(("b",), "a", "b"),), (), (), (), shapes).check_order(GraphUses(["a", "b"], [], [], frozenset()))
