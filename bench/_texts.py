"""Texts that several scripts here use."""

from __future__ import annotations

PASSAGES = (
    (
        "The lighthouse at the end of the pier was built in 1873 by a family of stonemasons from the north. Its lamp was first "
        "lit with whale oil, then with gas, and since 1931 with electricity. On clear nights the beam can be seen from the "
        "fishing villages on the far side of the bay, and the keepers used to say that every captain on the coast knew its "
        "rhythm by heart: two short flashes, a pause, and one long flash."
    ),
    (
        "Before the robot leaves its dock, it checks the charge of both batteries, the state of the brakes and the temperature "
        "of each motor. It then asks the planner for a route, announces itself to the other machines in the hall and waits "
        "until all of them have answered. Only when the last answer has arrived does it release the brakes, and it stops at "
        "once if a person steps into the space before it."
    ),
)
STORIES = (
    "Once upon a time, in a village by the sea,",
    "The train had been standing in the station for an hour when",
    "My grandmother never told anybody why she",
    "The three most surprising facts about the moon are",
)
