"""torch's compiler is imported once something is compiled, and is then as if it had been from the
start."""

import subprocess
import sys

import pytest

BEGIN = """
import sys
from rlx.importing import postpone_compiler
import torch

postpone_compiler()
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
assert "torch._dynamo.symbolic_convert" not in sys.modules
"""
COMPILE = """
compiled, rows = torch.compile(model, backend="eager", fullgraph=True), torch.ones(2, 3)
assert torch.equal(compiled(rows), model(rows))
assert sys.modules["torch._dynamo"] is torch._dynamo
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
compiled(rows).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    "first", ["", "from torch._dynamo.utils import counters", "from torch._dynamo import config"]
)
def test_the_compiler_comes_when_it_is_needed(first):
    code = "\n".join([BEGIN, first, COMPILE])
    subprocess.run([sys.executable, "-c", code], check=True)
