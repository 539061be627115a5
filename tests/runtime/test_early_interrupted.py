"""An interrupt while gradients leave: the push says so, and nothing stays under way."""

from __future__ import annotations

from unittest import mock

import pytest
from torch.distributed import rpc

from fxlib.errors import FxlibError
from fxlib.gradients import push_gradients
from fxlib.runtime.underway import UNDERWAY
from tests.runtime.early import TWO, backward, log, step, trained

pytestmark = pytest.mark.usefixtures("servers", "nothing_under_way")


def test_an_interrupt_while_a_gradient_leaves_is_an_error_of_its_push_and_of_no_step_after_it() -> None:
    module = trained(*TWO)
    with mock.patch.object(rpc, "rpc_async", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        backward(module)
    with pytest.raises(FxlibError, match="interrupted"):
        push_gradients(module)
    for server in ("ps0", "ps1"):
        UNDERWAY.settle(server)
    assert not UNDERWAY._travellers
    step(module)
    assert log() == ["a [1.0, 1.0]", "b [2.0, 2.0]"]
