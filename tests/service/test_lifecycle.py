import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxlib.spec.job import JobFailure
from fxlib_service.errors import Code, ServiceError
from fxlib_service.job import Job, State
from fxlib_service.lifecycle import (
    MAX_ATTEMPTS,
    MAX_EVENTS,
    Answered,
    Cancelled,
    Claimed,
    Completed,
    Failed,
    Input,
    LeaseExpired,
    Released,
    Reported,
    Transition,
    decide,
    submit,
)

CLAIM = Claimed(worker_id="w1", token="t1", hardware="cpu")
DONE = Completed(token="t1", result=b"answer", message="adopt")


def new(*, fresh: bool = False) -> Job:
    job = Job(
        id="j1",
        request_id="r1",
        request_digest="d",
        namespace="default",
        name="dlrm",
        torch_version="2.13.0",
        cache_key="k",
        fresh=fresh,
        created_at=0.0,
    )
    return submit(job).job


def after(*happened: Input, job: Job | None = None) -> Transition:
    transition = Transition(job=job or new())
    for now, each in enumerate(happened, start=1):
        transition = decide(transition.job, each, float(now))
    return transition


def test_a_new_job_is_queued_and_its_history_begins() -> None:
    entry = submit(new())
    assert entry.job.state is State.QUEUED
    assert entry.event is not None


def test_a_claim_makes_it_run_under_a_lease() -> None:
    job = after(CLAIM).job
    assert (job.state, job.phase, job.attempts, job.worker_id, job.token) == (State.RUNNING, "rewrite", 1, "w1", "t1")


def test_a_job_is_claimed_once() -> None:
    assert after(CLAIM, Claimed(worker_id="w2", token="t2", hardware="cpu")) == Transition(job=after(CLAIM).job)


def test_a_report_names_the_phase() -> None:
    transition = after(CLAIM, Reported(token="t1", phase="qps", message="block 3", progress=0.3))
    assert transition.job.phase == "qps"
    assert transition.event is not None
    assert (transition.event.message, transition.event.progress) == ("block 3", 0.3)


def test_an_answer_ends_it() -> None:
    transition = after(CLAIM, DONE)
    assert transition.job.state is State.SUCCEEDED
    assert transition.result == b"answer"
    assert transition.job.finished_at == 2.0


def test_a_repeated_answer_changes_nothing() -> None:
    assert after(CLAIM, DONE, DONE) == Transition(job=after(CLAIM, DONE).job)


FAILURE = Failed(token="t1", failure=JobFailure(code="REWRITE_FAILED", message="why"))
OTHER = Failed(token="t1", failure=JobFailure(code="TRIAL_FAILED", message="why"))


def test_a_repeated_failure_changes_nothing() -> None:
    assert after(CLAIM, FAILURE, FAILURE) == Transition(job=after(CLAIM, FAILURE).job)


@pytest.mark.parametrize("said", [(DONE, FAILURE), (FAILURE, DONE), (FAILURE, OTHER)])
def test_another_outcome_under_the_same_lease_is_refused(said: tuple[Input, Input]) -> None:
    with pytest.raises(ServiceError, match="another outcome"):
        after(CLAIM, *said)


def test_a_worker_s_failure_ends_it_with_the_reason() -> None:
    job = after(CLAIM, Failed(token="t1", failure=JobFailure(code="REWRITE_FAILED", message="why"))).job
    assert job.state is State.FAILED
    assert job.failure == JobFailure(code="REWRITE_FAILED", message="why")


def test_a_job_given_back_is_queued_and_has_lost_no_attempt() -> None:
    job = after(CLAIM, Released(token="t1")).job
    assert (job.state, job.attempts, job.worker_id, job.token) == (State.QUEUED, 0, "", "")


def test_a_lost_worker_s_job_is_queued_again() -> None:
    transition = after(CLAIM, LeaseExpired(token="t1"))
    assert (transition.job.state, transition.job.attempts) == (State.QUEUED, 1)
    assert transition.event is not None
    assert "w1 was lost (attempt 1 of 3)" in transition.event.message


def test_three_lost_workers_fail_it() -> None:
    life: list[Input] = [CLAIM, LeaseExpired(token="t1")]
    job = after(*life * MAX_ATTEMPTS).job
    assert job.state is State.FAILED
    assert job.failure is not None
    assert job.failure.code == "WORKER_LOST"


def test_an_expiry_of_another_lease_changes_nothing() -> None:
    assert after(CLAIM, LeaseExpired(token="t0")).event is None


@pytest.mark.parametrize("happened", [Cancelled(), LeaseExpired(token="t1"), Released(token="t1")])
def test_a_finished_job_stays_as_it_is(happened: Input) -> None:
    assert after(CLAIM, DONE, happened) == Transition(job=after(CLAIM, DONE).job)


def test_a_cancelled_job_ignores_its_worker_s_last_words() -> None:
    assert after(CLAIM, Cancelled(), DONE).job.state is State.CANCELLED


@pytest.mark.parametrize(
    "said",
    [
        Reported(token="t0", phase="qps"),
        Completed(token="t0", result=b"", message=""),
        Released(token="t0"),
        Failed(token="t0", failure=JobFailure(code="X", message="")),
        Released(token=""),
    ],
)
@pytest.mark.parametrize("before", [[], [CLAIM], [CLAIM, DONE], [CLAIM, LeaseExpired(token="t1")]])
def test_what_comes_under_another_lease_is_refused(said: Input, before: list[Input]) -> None:
    with pytest.raises(ServiceError) as refusal:
        after(*before, said)
    assert refusal.value.code is Code.LEASE_LOST


def test_an_equal_job_s_answer_ends_a_queued_one() -> None:
    transition = after(Answered(job_id="j0", result=b"answer"))
    assert (transition.job.state, transition.job.cached, transition.result) == (State.SUCCEEDED, True, b"answer")


def test_an_equal_job_s_failure_ends_a_queued_one() -> None:
    failure = JobFailure(code="WORKER_LOST", message="why")
    job = after(Answered(job_id="j0", failure=failure)).job
    assert (job.state, job.cached, job.failure) == (State.FAILED, True, failure)


def test_an_equal_job_s_answer_is_not_for_those_who_asked_for_a_fresh_one() -> None:
    assert after(Answered(job_id="j0", result=b"answer"), job=new(fresh=True)).event is None


def test_a_history_is_bounded_and_still_ends() -> None:
    transition = after(CLAIM, *[Reported(token="t1", phase="qps")] * (MAX_EVENTS + 10))
    assert transition.job.last_sequence == MAX_EVENTS
    end = decide(transition.job, DONE, 1.0)
    assert end.event is not None
    assert end.event.state is State.SUCCEEDED


def test_workers_that_take_and_give_back_without_end_fill_no_disk() -> None:
    taken: list[Input] = [CLAIM, Released(token="t1")]
    transition = after(*taken * (MAX_EVENTS // 2 - 1))
    assert (transition.job.state, transition.job.attempts) == (State.QUEUED, 0)
    ended = after(*taken * MAX_ATTEMPTS, job=transition.job)
    assert (ended.job.state, ended.job.attempts) == (State.FAILED, MAX_ATTEMPTS)
    assert ended.job.failure == JobFailure(
        code="WORKER_LOST", message="given back by worker w1: its workers give it back without end"
    )
    assert ended.job.last_sequence <= MAX_EVENTS + 2 * MAX_ATTEMPTS


TOKENS = st.sampled_from(["t1", "t2", ""])
INPUTS: st.SearchStrategy[Input] = st.one_of(
    st.builds(Claimed, worker_id=st.just("w"), token=st.sampled_from(["t1", "t2"]), hardware=st.just("cpu")),
    st.builds(Reported, token=TOKENS, phase=st.just("qps")),
    st.builds(Completed, token=TOKENS, result=st.just(b"answer"), message=st.just("done")),
    st.builds(Failed, token=TOKENS, failure=st.just(JobFailure(code="X", message=""))),
    st.builds(Released, token=TOKENS),
    st.builds(LeaseExpired, token=TOKENS),
    st.builds(Answered, job_id=st.just("j0"), result=st.just(b"answer")),
    st.builds(Cancelled),
)


@pytest.mark.slow
@given(st.lists(INPUTS, max_size=30))
def test_whatever_happens_a_history_counts_on_and_ends_once(inputs: list[Input]) -> None:
    job, finished = new(), 0
    for now, happened in enumerate(inputs):
        try:
            transition = decide(job, happened, float(now))
        except ServiceError:
            continue
        if transition.event is None:
            assert transition == Transition(job=job)
            continue
        assert transition.event.sequence == transition.job.last_sequence == job.last_sequence + 1
        assert transition.event.state is transition.job.state
        finished += transition.job.state.finished
        job = transition.job
        assert 0 <= job.attempts <= MAX_ATTEMPTS
        assert (job.state is State.RUNNING) <= bool(job.token)
        assert job.state.finished == (job.finished_at is not None)
    assert finished == job.state.finished
