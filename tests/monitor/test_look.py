"""Each key of the screen has its effect; the tests need no terminal."""

from dataclasses import replace

import pytest

from staleflow.monitor.history import History
from staleflow.monitor.keyboard import parse
from staleflow.monitor.look import SORTS, TABS, Look, press
from staleflow.monitor.model import Board, board
from tests.monitor.world import shown


def it() -> Board:
    return board("run", shown(), History())


def pressed(look: Look, *keys: str) -> Look:
    for key in keys:
        look = press(look, key, it())
    return look


def test_numbers_and_tab_choose_a_list() -> None:
    assert [pressed(Look(row=3), str(n)) for n in range(1, 7)] == [Look(tab=tab) for tab in TABS]
    assert pressed(Look(), "7") == Look()
    assert pressed(Look(), "backtab").tab == TABS[-1]
    assert pressed(Look(), "backtab", "tab").tab == TABS[0]


@pytest.mark.parametrize("key", ["²", "³", "¹", "٣", "①"])
def test_a_digit_that_is_not_one_of_ten_chooses_nothing(key: str) -> None:
    assert pressed(Look(row=3), key) == Look(row=3)
    assert pressed(Look(), "g", key, "1", key, "7", "enter") == Look(story=17)


def test_the_engines_are_sorted_by_each_column_largest_first() -> None:
    look, seen = Look(tab="events"), list[tuple[str, bool]]()
    for _ in SORTS:
        look = pressed(look, "s")
        seen.append((look.sort, look.reverse))
    assert seen == [*[(sort, sort != "version") for sort in SORTS[1:]], ("name", False)]
    assert look.tab == "engines"
    assert pressed(look, "r") == replace(look, reverse=True)


def test_a_filter_works_while_it_is_typed_and_stays_until_escape() -> None:
    typing = pressed(Look(row=4), "/", "o", "q", "backspace", "u")
    assert typing == Look(typing="filter", typed="ou", needle="ou")
    kept = pressed(typing, "enter")
    assert kept == Look(needle="ou")
    assert pressed(kept, "/", "t") == Look(typing="filter", typed="out", needle="out")
    assert pressed(kept, "escape") == pressed(typing, "escape") == Look()


def test_a_story_is_opened_by_number_or_by_choosing_a_group_that_pins() -> None:
    assert pressed(Look(), "g", "1", "x", "1", "7", "enter") == Look(story=117)
    assert pressed(Look(), "g", "enter") == Look()
    assert pressed(Look(tab="groups"), "enter").story == 117
    assert pressed(Look(tab="groups"), "down", "down", "down", "enter").story == 119
    assert pressed(Look(tab="groups", story=117, row=2), "q") == Look(tab="groups")
    assert pressed(Look(story=117), "3") == Look(tab="stages")


def test_of_filtered_groups_the_chosen_one_is_opened() -> None:
    assert pressed(Look(tab="groups", needle="reward"), "enter").story == 119
    assert pressed(Look(tab="groups", needle="rollout"), "down", "enter").story == 117
    assert pressed(Look(tab="groups", needle="nobody"), "enter").story is None


def test_rows_are_chosen_and_never_before_the_first_nor_behind_the_last() -> None:
    assert [
        pressed(Look(), *keys).row for keys in (("down",), ("j", "down"), ("down", "j", "down"), ("pagedown",))
    ] == [*(1, 2, 2, 2)]
    assert pressed(Look(), "pagedown", "up", "k", "k").row == 0
    assert pressed(Look(row=5), "pageup").row == 0
    assert pressed(Look(row=500), "home").row == 0
    assert pressed(Look(row=500), "up").row == 1, "rows that are gone are not walked through"
    assert pressed(Look(tab="groups", needle="reward"), "down").row == 0
    assert pressed(Look(needle="nobody"), "down").row == 0


@pytest.mark.parametrize(("tab", "last"), [*zip(TABS, (2, 1, 1, 1, 2, 3), strict=True)])
def test_the_last_row_of_every_list_is_one_key_away(tab: str, last: int) -> None:
    assert pressed(Look(tab=tab), "end").row == last


def test_a_story_is_scrolled_as_far_as_one_likes_and_has_no_last_row_here() -> None:
    assert pressed(Look(story=117), "pagedown", "down").row == 11
    assert pressed(Look(story=117, row=4), "end") == Look(story=117, row=4)
    assert pressed(Look(help=True, row=4), "end") == Look(help=True, row=4)


@pytest.mark.parametrize("key", ["q", "interrupt"])
def test_one_leaves_by_q_or_ctrl_c(key: str) -> None:
    assert pressed(Look(), key).leaving


def test_ctrl_c_leaves_whatever_is_typed() -> None:
    assert pressed(Look(), "/", "interrupt").leaving
    assert not pressed(Look(), "/", "q").leaving


def test_any_key_ends_the_help() -> None:
    assert pressed(Look(), "?").help
    assert pressed(Look(), "h", "q") == Look()


def test_the_screen_is_held_still() -> None:
    assert pressed(Look(), " ").paused
    assert pressed(Look(), " ", "p") == Look()


def test_a_replay_goes_faster_slower_and_elsewhere() -> None:
    look = Look(speed=1.0)
    assert pressed(look, "+", "+").speed == 5.0
    assert pressed(look, *"-----").speed == 0.1
    assert pressed(look, *"++++++++").speed == 1000.0
    assert pressed(Look(speed=7.0), "+").speed == 10.0
    assert pressed(look, "left").jump_s == -10.0
    assert pressed(look, "right").jump_s == 10.0
    assert pressed(Look(), "+", "left") == Look(), "what is live goes as it goes"


def test_bytes_of_a_terminal_are_keys() -> None:
    assert parse(b"q/\x1b[A\x1b[6~\x1b[Z\r\x7f\t\x03") == [
        *("q", "/", "up", "pagedown", "backtab", "enter", "backspace", "tab", "interrupt")
    ]
    assert parse(b"\x1b") == ["escape"]
    assert parse("ü€".encode()) == ["ü", "€"]
    assert parse(b"\x1b[15~x\x00\xff") == ["x"], "keys without a name are none"
