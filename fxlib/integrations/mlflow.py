"""Results in MLflow, which `pip install 'fxlib[mlflow]'` brings."""

from __future__ import annotations

import mlflow

from fxlib.client.result import Result
from fxlib.integrations.trackers import live_metrics_of, metrics_of, params_of
from fxlib.render import report_page
from fxlib.spec.report import LiveFigures


def log_result(result: Result, *, run_id: str | None = None) -> None:
    """Log a result: numbers as metrics, words as parameters, `fxlib/result.json` and `fxlib/report.html` as artifacts.

    Args:
        result: the answer to `client.optimize`.
        run_id: the run; None: the active one, or a new one as MLflow begins it.

    Raises:
        MlflowException: MLflow refuses, or its server is away.
    """
    mlflow.log_params(params_of(result), run_id=run_id)
    mlflow.log_metrics(metrics_of(result), run_id=run_id)
    mlflow.log_dict(result.to_dict(), "fxlib/result.json", run_id=run_id)
    mlflow.log_text(report_page(result), "fxlib/report.html", run_id=run_id)


def log_live(live: LiveFigures, *, run_id: str | None = None) -> None:
    """Log a job's figures from its own steps, `result.watch().figures`, at the number of steps by then.

    Args:
        live: the present figures.
        run_id: as for `log_result`.

    Raises:
        MlflowException: MLflow refuses, or its server is away.
    """
    mlflow.log_metrics(live_metrics_of(live), step=live.steps, run_id=run_id)
