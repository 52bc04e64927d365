"""Single flight: what a second delivery of an order does."""

from workers.lane.flight import REMEMBERED, Arrival, Flight


class Settled:
    """Remembers how a delivery was settled."""

    def __init__(self) -> None:
        self.how: list[bool] = []

    def __call__(self, published: bool) -> None:
        self.how.append(published)


def test_a_duplicate_waits_for_the_first_and_is_settled_by_its_end() -> None:
    flight, second, third = Flight(), Settled(), Settled()
    assert flight.arrive("order", "p1", Settled()) is Arrival.FIRST
    assert flight.arrive("order", "p1", second) is Arrival.WAITS
    assert flight.arrive("order", "p2", third) is Arrival.WAITS
    assert flight.arrive("another", "p3", Settled()) is Arrival.FIRST
    assert (second.how, third.how) == ([], [])
    assert flight.finish("order", "p1", published=True) == 2
    assert (second.how, third.how) == ([True], [True])


def test_a_duplicate_of_what_was_given_back_is_given_back_too() -> None:
    flight, second = Flight(), Settled()
    flight.arrive("order", "p1", Settled())
    flight.arrive("order", "p1", second)
    flight.finish("order", "p1", published=False)
    assert second.how == [False]
    assert flight.arrive("order", "p1", Settled()) is Arrival.FIRST


def test_a_late_delivery_of_what_is_done_is_known() -> None:
    flight = Flight()
    flight.arrive("order", "p1", Settled())
    flight.finish("order", "p1", published=True)
    assert flight.arrive("order", "p1", Settled()) is Arrival.DONE


def test_an_order_that_is_published_anew_is_run_again() -> None:
    flight = Flight()
    flight.arrive("order", "p1", Settled())
    flight.finish("order", "p1", published=True)
    assert flight.arrive("order", "p2", Settled()) is Arrival.FIRST, "its result was lost, the feeder says"


def test_memory_of_what_is_done_is_bounded() -> None:
    flight = Flight()
    for number in range(REMEMBERED + 5):
        flight.arrive(f"o{number}", f"p{number}", Settled())
        flight.finish(f"o{number}", f"p{number}", published=True)
    assert not flight.has_done("p4")
    assert flight.has_done("p5")
