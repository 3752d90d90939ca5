from threading import Thread

from torch.fx import Graph, GraphModule

from inductor_passes.torch_compat.fx import generating_no_code


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
