"""What a compiled graph's program is known by."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tpu_compile.op_digests import op_digests
from tpu_compile.sizes import Symbols
from tpu_core.cache.sources import digest_around
from tpu_core.lowering.registry import register


def test_the_source_of_an_op_of_another_package_is_in_the_key_of_a_graph(tmp_path) -> None:
    library = torch.library.Library("graph_keys", "DEF")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", torch.empty_like, "Meta")
    file = tmp_path / "op.py"
    file.write_text("def scaled(x):\n    return x * 2\n")
    names: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    register("graph_keys.scaled.default", names["scaled"])
    x = torch.empty(3, device="meta")
    graph = make_fx(lambda x: torch.ops.graph_keys.scaled(torch.sin(x)))(x)
    bound = Symbols([], []).bind([], [])
    assert list(op_digests(graph, bound)) == [digest_around(file)]
