"""What holds for all tests of integrations."""

import pytest
from torch.distributed import rpc


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep models from asking the servers that other tests may have left in this process."""
    monkeypatch.setattr(rpc.api, "_is_current_rpc_agent_set", lambda: False)
