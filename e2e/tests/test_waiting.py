"""A wait that fails says what is so at its end, and what it waited for."""

import pytest

from aerostat_testing.waiting import NotInTimeError, eventually, wait_for

pytestmark = pytest.mark.cpu


async def test_what_is_said_of_a_wait_is_asked_for_when_its_time_is_over() -> None:
    seen: list[int] = []
    with pytest.raises(NotInTimeError, match=r"^not within 0 s: five are seen, not 1$"):
        wait_for(lambda: seen.append(1), lambda: f"five are seen, not {len(seen)}", limit=0.0)
    with pytest.raises(NotInTimeError, match=r"^not within 0 s: five are seen, not 2$"):
        await eventually(lambda: seen.append(1), lambda: f"five are seen, not {len(seen)}", limit=0.0)


def test_the_first_answer_that_is_true_ends_it() -> None:
    answers = iter((None, 0, 3, 4))
    assert wait_for(lambda: next(answers), "it answers") == 3
