"""``backend="simplefsdp"``: how it is found, which options it takes, and what enters the compile cache's key."""

import logging
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import MixedPrecisionPolicy

import inductor_passes
import simplefsdp
from inductor_passes import inductor_order
from inductor_passes.runtime import graph_dump
from simplefsdp import BucketPlan, manual_plan, simple_fsdp
from simplefsdp.compile import context
from simplefsdp.compile.context import compilation_context
from simplefsdp.compile.options import Options, parse_options
from tests.models import batch, tiny_llama
from tests.ranks import fake_group

one_of_four = pytest.mark.usefixtures("one_of_four")


class Spy:
    """A pass of Inductor's that changes nothing, and notes the configuration under which it is called."""

    def __init__(self):
        self.seen = []

    def __call__(self, _graph):
        self.seen.append((inductor_config.max_autotune, inductor_config.coordinate_descent_tuning))

    def uuid(self):
        return None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"plna": "block"}, ValueError, "unknown option 'plna'; did you mean 'plan'?"),
        ({"plan": "blocks"}, ValueError, "unknown plan 'blocks'; did you mean 'block'?"),
        (
            {"plan": ["layers.*"]},
            TypeError,
            "option 'plan': expected a name, manual_plan([...]), a BucketPlan or a path",
        ),
        (
            {"lower_with": "eager"},
            ValueError,
            "option 'lower_with': unknown lowering 'eager'; did you mean 'aot_eager'",
        ),
        ({"report_dir": 3}, TypeError, "option 'report_dir': expected a path, found 3"),
        ({"inductor": ["x"]}, TypeError, "option 'inductor': expected a dict"),
        ({"inductor": {"max_autotnue": True}}, ValueError, "unknown Inductor option 'max_autotnue'; did you mean"),
        (
            {"inductor": {"post_grad_custom_post_pass": None}},
            ValueError,
            "option 'inductor': 'post_grad_custom_post_pass' is used by simplefsdp itself",
        ),
        (
            {"inductor": {"reorder_for_peak_memory": True}},
            ValueError,
            "option 'inductor': 'reorder_for_peak_memory' would move what the plan has ordered; plan='none' allows it",
        ),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        parse_options(options)


@pytest.mark.compile
@one_of_four
def test_a_bad_option_is_an_error_of_the_first_call():
    model = torch.compile(simple_fsdp(nn.Linear(2, 8)), backend="simplefsdp", options={"plna": "block"})
    with pytest.raises(Exception, match="unknown option 'plna'; did you mean 'plan'"):
        model(torch.zeros(1, 2))


def test_options_have_defaults():
    assert parse_options(None) == Options(plan="auto", lower_with="inductor", report_dir=None)


def test_the_environment_may_name_the_folder_of_reports(monkeypatch):
    monkeypatch.setenv("SIMPLEFSDP_REPORT_DIR", "out/report")
    assert parse_options({"plan": "none"}).report_dir == "out/report"
    assert parse_options({"report_dir": "elsewhere"}).report_dir == "elsewhere"
    monkeypatch.setenv("SIMPLEFSDP_REPORT_DIR", "")
    assert parse_options(None).report_dir is None


@pytest.mark.subprocess
def test_the_backend_is_an_entry_point_and_found_without_importing_the_package():
    (entry,) = entry_points(group="torch_dynamo_backends", name="simplefsdp")
    assert entry.value == "simplefsdp.compile.backend:simplefsdp"
    code = "import torch; assert 'simplefsdp' in torch.compiler.list_backends()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.compile
@one_of_four
def test_the_default_plan_says_what_it_means(caplog):
    from simplefsdp.compile.options import _say_what_auto_is

    _say_what_auto_is.cache_clear()
    model = torch.compile(simple_fsdp(nn.Linear(2, 8)), backend="simplefsdp", options={"lower_with": "aot_eager"})
    with caplog.at_level(logging.WARNING, "simplefsdp"):
        model(torch.zeros(1, 2))
    assert "plan='auto' means 'block'" in caplog.text


@pytest.mark.compile
@one_of_four
def test_module_compile_in_place_uses_the_backend():
    model = simple_fsdp(tiny_llama())
    model.compile(backend="simplefsdp", fullgraph=True, options={"plan": "block", "lower_with": "aot_eager"})
    model(*batch(0, 0)).backward()
    assert list(model.state_dict()) == list(tiny_llama().state_dict())
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.compile
@one_of_four
def test_inductor_options_reach_inductor():
    spy = Spy()
    torch._dynamo.reset()
    model = simple_fsdp(nn.Linear(2, 8))
    options = {"plan": "block", "inductor": {"post_grad_custom_pre_pass": spy}}
    torch.compile(model, backend="simplefsdp", options=options)(torch.zeros(1, 2))
    assert spy.seen


@pytest.mark.compile
@one_of_four
def test_a_mode_is_a_name_for_options_of_inductor():
    spy = Spy()
    torch._dynamo.reset()
    model = simple_fsdp(nn.Linear(2, 8))
    with inductor_config.patch(post_grad_custom_pre_pass=spy):
        torch.compile(model, backend="simplefsdp", mode="max-autotune-no-cudagraphs")(torch.zeros(1, 2))
        assert spy.seen == [(True, True)]
        torch._dynamo.reset()
        torch.compile(model, backend="simplefsdp", mode="default")(torch.zeros(1, 2))
    assert spy.seen == [(True, True), (False, False)]


def _key(policy=None, options=None, reshard=True):
    model = simple_fsdp(tiny_llama(), mp_policy=policy, reshard_after_forward=reshard)
    return compilation_context(list(model.parameters()), parse_options(options)).key


def test_ranks_share_cache_entries_only_where_their_shards_have_the_same_shapes():
    keys = []
    for rank in range(4):
        with fake_group(4, rank):
            keys.append(_key())
    # 30 rows on 4 ranks are 8, 8, 8 and 6
    assert keys[0] == keys[1] == keys[2] != keys[3]


@one_of_four
def test_the_cache_key_holds_what_the_passes_depend_on():
    assert _key() == _key()
    different = [
        _key(),
        _key(MixedPrecisionPolicy(torch.bfloat16)),
        _key(options={"plan": "none"}),
        _key(reshard=False),
        _key(reshard={"layers.0.*": False}),
    ]
    assert len(set(different)) == len(different)


@one_of_four
def test_the_cache_key_holds_plan_options_and_whether_there_is_a_report(tmp_path):
    options = [
        {"plan": "block"},
        {"plan": manual_plan(["layers.*"], prefetch=0)},
        {"plan": manual_plan(["layers.*"], prefetch=1)},
        {"plan": manual_plan([["layers.*"]], prefetch=1)},
        {"plan": "block", "report_dir": str(tmp_path)},
        {"plan": "block", "inductor": {"max_autotune": True}},
        {"plan": "block", "cast_in_matmuls": False},
        {"plan": "block", "cast_before_gather": False},
        {"plan": "block", "compile_once": False},
    ]
    keys = [_key(options=each) for each in options]
    assert len(set(keys)) == len(options)
    assert keys == [_key(options=each) for each in options]


def test_switches_that_are_not_true_or_false_are_refused_by_name():
    for name in ("cast_in_matmuls", "cast_before_gather", "compile_once"):
        with pytest.raises(TypeError, match=f"option '{name}': expected True or False, found 1"):
            parse_options({name: 1})


@one_of_four
def test_blocks_are_not_shared_where_inductor_generates_cpp_around_its_kernels():
    compiles_once = [
        compilation_context([], parse_options({"plan": "block", "inductor": inductor})).compile_once
        for inductor in ({}, {"cpp_wrapper": True})
    ]
    assert compiles_once == [True, False]


@one_of_four
def test_the_cache_key_holds_whether_groups_are_issued_and_a_warning_says_so_once(monkeypatch, caplog):
    profile = {"plan": "block", "profile": "h100/h100-1-node"}
    key = _key(options=profile)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "an nccl that issues no groups")
    assert _key(options=profile) == _key(options=profile) != key
    assert [
        record.message for record in caplog.records if "issues the collectives of a group one by one" in record.message
    ]
    caplog.clear()
    _key(options=profile)
    assert not caplog.records


@one_of_four
def test_a_change_of_any_source_file_of_both_packages_is_another_compile_cache_key(monkeypatch):
    hashed = []
    monkeypatch.setattr(context, "get_hash_for_files", lambda files: hashed.extend(files) or b"other")
    before = _key()
    context.source_hash.cache_clear()
    try:
        assert _key() != before
    finally:
        context.source_hash.cache_clear()
    folders = Path(inductor_passes.__path__[0]), Path(simplefsdp.__path__[0])
    files = {str(path) for folder in folders for path in folder.rglob("*.py")}
    assert len({Path(file).parent for file in files}) > 10  # files of sub-packages are among them
    assert set(hashed) == files


@pytest.mark.subprocess
@pytest.mark.compile
@one_of_four
def test_without_a_report_nothing_is_written_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args: object) -> None:
        raise AssertionError("for a report that nobody asked for")

    for module, name in (
        (graph_dump, "render_graph"),
        (graph_dump, "running_code"),
        (inductor_order, "render_kernels"),
    ):
        monkeypatch.setattr(module, name, never)
    with fresh_cache():
        torch._dynamo.reset()
        compiled = torch.compile(simple_fsdp(nn.Linear(8, 8)), backend="simplefsdp", options={"plan": "block"})
        compiled(torch.ones(4, 8)).sum().backward()


@one_of_four
@pytest.mark.slow
def test_a_report_shows_each_graph_before_and_after_each_pass_also_from_a_warm_cache(tmp_path):
    model = simple_fsdp(tiny_llama(layers=1))
    counters = torch._dynamo.utils.counters["aot_autograd"]
    found = []
    with fresh_cache():
        for folder in (tmp_path / "cold", tmp_path / "warm"):
            torch._dynamo.reset()
            counters.clear()
            options = {"plan": "block", "report_dir": str(folder)}
            compiled = torch.compile(model, backend="simplefsdp", options=options, fullgraph=True)
            for _ in range(2):
                compiled(*batch(0, 0)).backward()
                with torch.no_grad():  # another graph of the same parameters
                    compiled(*batch(0, 0))
            found.append({path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*")})
            assert counters["autograd_cache_hit"] == (2 if folder.name == "warm" else 0)
    cold, warm = found
    first_steps = [[files.pop(f"graph_0_{i}/first_step.txt") for i in range(2)] for files in found]
    assert all("lowering forward" in seconds for seconds in first_steps[0])
    assert all(": tracing " in seconds and "lowering" not in seconds for seconds in first_steps[1])
    assert cold == warm
    assert sorted(cold) == [
        "graph_0_0/01_joint_before_identify.txt",
        "graph_0_0/02_joint_after_identify.txt",
        "graph_0_0/03_forward_before_bucket.txt",
        "graph_0_0/04_forward_after_bucket.txt",
        "graph_0_0/05_forward_before_order.txt",
        "graph_0_0/06_forward_after_order.txt",
        "graph_0_0/07_forward_code.py",
        "graph_0_0/08_backward_before_bucket.txt",
        "graph_0_0/09_backward_after_bucket.txt",
        "graph_0_0/10_backward_before_order.txt",
        "graph_0_0/11_backward_after_order.txt",
        "graph_0_0/12_backward_code.py",
        "graph_0_0/backward_bodies.txt",
        "graph_0_0/forward_bodies.txt",
        "graph_0_0/plan.json",
        "graph_0_0/traced_once.txt",
        "graph_0_1/01_forward_before_identify.txt",
        "graph_0_1/02_forward_after_identify.txt",
        "graph_0_1/03_forward_before_bucket.txt",
        "graph_0_1/04_forward_after_bucket.txt",
        "graph_0_1/05_forward_before_order.txt",
        "graph_0_1/06_forward_after_order.txt",
        "graph_0_1/07_forward_code.py",
        "graph_0_1/forward_bodies.txt",
        "graph_0_1/plan.json",
        "graph_0_1/traced_once.txt",
    ]
    before, after = (
        cold[f"graph_0_0/{name}.txt"] for name in ("08_backward_before_bucket", "09_backward_after_bucket")
    )
    assert before.count("reduce_scatter_tensor.default(") == 12
    assert after.count("reduce_scatter_tensor.default(") == 3
    assert "# layers.0.attention.wq.weight, layers.0.attention.wk.weight" in after
    assert len(BucketPlan.from_json(cold["graph_0_0/plan.json"]).reductions) == 3
    kernels = [cold[f"graph_0_0/{name}_order.txt"].splitlines() for name in ("10_backward_before", "11_backward_after")]
    assert kernels[0] != kernels[1]
    assert sorted(kernels[0]) == sorted(kernels[1])
    assert [line.split("# ")[1].split(": ")[0] for line in kernels[1] if "# " in line].count("reduction") == 3
    code = cold["graph_0_0/12_backward_code.py"].split("def call(")[1]
    operators = r"_c10d_functional\.(all_gather_into_tensor|reduce_scatter_tensor|wait_tensor)"
    assert re.findall(operators + r"\.default\(", code) == re.findall(f"= {operators}", "\n".join(kernels[1]))


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.compile
@pytest.mark.parametrize("plan", ["block", "none"])
def test_a_plan_is_logged_once_also_from_a_warm_cache(caplog, plan):
    counters = torch._dynamo.utils.counters["aot_autograd"]
    with fresh_cache():
        for world in ("cold", "warm"):
            torch._dynamo.reset()
            counters.clear()
            caplog.clear()
            with fake_group(4), caplog.at_level(logging.INFO, "simplefsdp"):
                model = simple_fsdp(tiny_llama(layers=1))
                compiled = torch.compile(model, backend="simplefsdp", options={"plan": plan}, fullgraph=True)
                for _ in range(2):
                    compiled(*batch(0, 0)).backward()
            lines = [record.message for record in caplog.records if record.levelname == "INFO"]
            (line,) = (line for line in lines if not line.startswith("compiled: "))
            assert counters["autograd_cache_hit"] == (world == "warm")
            expected = "plan none: 35 collectives" if plan == "none" else r"plan [0-9a-f]{16}: 35 -> 8 collectives"
            assert re.fullmatch(expected, line)


class _WithABranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.layers[0](x),))
        return self.layers[1](x)


@pytest.mark.subprocess
@pytest.mark.compile
@one_of_four
def test_the_branches_of_a_cond_are_left_alone(tmp_path):
    model = simple_fsdp(_WithABranch())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="simplefsdp", options={"plan": "block", "report_dir": tmp_path})
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(torch.ones(4, 8)).sum().backward()
    (folder,) = tmp_path.iterdir()
    assert not list(folder.glob("*_forward_*_identify.txt")), "a branch is no forward graph"
    assert "layers.1.weight" in (folder / "04_forward_after_bucket.txt").read_text()
    assert len(BucketPlan.load(folder / "plan.json").reductions) == 2


@pytest.mark.compile
@one_of_four
def test_inductor_options_without_inductor_are_mentioned(caplog):
    model = simple_fsdp(nn.Linear(8, 8))
    torch._dynamo.reset()
    options = {"plan": "none", "lower_with": "aot_eager", "inductor": {"max_autotune": True}}
    torch.compile(model, backend="simplefsdp", options=options)(torch.ones(4, 8))
    assert "option 'inductor' has no effect with lower_with='aot_eager': max_autotune" in caplog.text
