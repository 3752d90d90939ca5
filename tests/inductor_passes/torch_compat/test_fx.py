from threading import Thread

from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

from inductor_passes.torch_compat.fx import as_lazy_as, generating_no_code


def module():
    graph = Graph()
    graph.output(graph.call_function(abs, (graph.placeholder("x"),)))
    return GraphModule({}, graph)


def test_graph_modules_of_this_thread_generate_no_code():
    found = []
    with generating_no_code():
        mine = module()
        other = Thread(target=lambda: found.append(module()))
        other.start()
        other.join()
    assert "forward" not in vars(type(mine))
    assert found[0](-1) == 1
    mine.recompile()
    assert mine(-1) == 1


def test_a_module_is_as_lazy_as_another():
    lazy, plain = _LazyGraphModule({}, module().graph), module()
    assert as_lazy_as(module(), plain) is plain
    assert as_lazy_as(lazy, lazy) is lazy
    made = as_lazy_as(lazy, plain)
    assert made.graph.owning_module is made
    assert made._needs_recompile()
    assert made(-1) == 1
