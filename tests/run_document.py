"""Run the Python examples of a document, in order, in one process that is its own parameter server.

python -m tests.run_document DOCUMENT ADDRESS
"""

import os
import re
import socket
import sys
import tempfile
import warnings
from pathlib import Path

from torch.distributed import rpc

from fxlib import Server, Table, ps


def main(document: Path, address: str) -> None:
    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", "You are using a Backend .* as a ProcessGroup")
    ps.setup(Server(name="ps0", tables=(Table(name="users", rows=1000, dim=16),)), seed=0)
    with tempfile.NamedTemporaryFile() as meeting:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting.name}", _transports=["uv"])
        rpc.init_rpc("ps0", rank=0, world_size=1, rpc_backend_options=options)
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        text, names = document.read_text(), {"__name__": "example"}
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, block.start()) + 1
            if re.match(r"# \w+\.py\n", block[1]):
                continue  # a file of a program, which runs by itself
            source = "\n" * line + block[1].replace("localhost:8470", address)
            exec(compile(source, str(document), "exec"), names)  # noqa: S102 - the project's own documents
        rpc.shutdown()


def _free_port() -> str:
    """For examples that `torchrun` would start."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
