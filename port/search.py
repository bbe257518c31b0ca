"""
Which mistakes make the paper's layer into the port? Found by trying, the fewest mistakes first.

Where W_q is 0, all maps are flat, and what makes the scores plays no part. So there are two stages:
first mistakes with which our layer equals the port while the maps are flat, and then, with these,
some that show only where the maps are sharp. Numbers are fitted: a factor, lambda_init, the scale.
If that explains nothing, theta is fitted as well, and fewer channels may turn.
"""
import itertools
import math
import sys
import time
from dataclasses import replace

from port import given, paper, wrong
from port.compare import Draw
from port.mistakes import BY_CODE, CHOICE, DIFFERS, SAME

SECONDS = 18  # of one core, for a search
MOST = 5  # mistakes at once that are called DIFFERS
# combinations with as many mistakes that are called DIFFERS are tried in the order of this sum
COST = {DIFFERS: 100, CHOICE: 10, SAME: 1}
# while all maps are flat, outputs nearer than this count as equal. It is more than elsewhere, since
# A_1 - lambda A_2 is small there, so that rounding and the eps of the norm show more
FLAT = 1e-4
THETAS = (1e4, 100.0, 1e6)  # theta is fitted from each of these: a fit from one may miss it
# with these in place of the step turn no theta is fitted: nothing turns, or both maps as one vector
WITHOUT_THETA = (wrong.no_turn, wrong.turn_both_maps, wrong.turn_both_maps_by_halves)
NOT_OF_SOFTMAX = ("values", "subtract", "norm", "rms", "gain", "output")  # steps


class TooLong(Exception):
    """A search has used up its time."""


class Clock:
    """Counts combinations, says after five seconds that it is still looking, and ends a search.

    One clock serves all searches for a layer: the first, and shorter ones in other readings of it.
    """

    def __init__(self):
        self.tries = 0
        self.ends = math.inf  # no search runs yet
        self.began = time.monotonic()
        self.has_spoken = False

    def tick(self):
        self.tries += 1
        if not self.has_spoken and time.monotonic() - self.began > 5:
            self.has_spoken = True
            print(f"still looking for causes, after {self.tries} combinations. It may take "
                  "half a minute of one core, and longer where that has other work",
                  file=sys.stderr)
        if time.process_time() > self.ends:
            raise TooLong


class Found:
    """What explains a port: mistakes, and w of two draws, with the numbers that were fitted.

    draw: the first of them. again: w of the second, whose lambda vectors are others.
    """

    def __init__(self, reading, mistakes, steps, error, draw, w, again):
        self.reading = reading
        self.mistakes = mistakes
        self.steps = steps
        self.error = error
        self.draw = draw
        self.w = w
        self.again = again

    def has_the_papers_lambda(self, near):
        """In the paper's form lambda without what the vectors make is the same in both draws."""
        is_version_1 = self.reading.version == 1 and bool(self.w.exp_part.any())
        return is_version_1 and bool(abs(self.w.lambda_init - self.again.lambda_init) < near)


class Search:
    """The search for one port in one reading, with what it has tried so far."""

    def __init__(self, port, reading, seen, clock, seconds=SECONDS, most=MOST):
        self.reading = reading
        self.seen = seen
        norms = {name for name, role in port.roles.items() if role == "norm"}
        self.has_gain = bool(norms - seen.unused_norms)
        self.steps = paper.steps_of(reading.version, reading.causal)
        self.clock = clock
        self.seconds = seconds
        self.most = most
        self.was_cut_off = False  # its time was up before all combinations were tried
        self.seconds_spent = 0.0  # of one core
        self.combinations = 0  # that were tried
        self.flat_errors = [math.inf]
        self.sharp_errors = [math.inf]
        self.fitting = []  # [(mistakes, tries), ...] with which it is right while maps are flat
        self.tries = []  # for each order of fused rows and each way to call it: three draws
        orders = given.orders(port.fused, reading.heads)
        for order, way in itertools.product(orders, seen.ways):
            flat = Draw(port, reading, seen, way, order, seed=1, flat=True)
            if flat.has_the_sizes_of(self.steps):
                sharp = Draw(port, reading, seen, way, order, seed=1, flat=False)
                other = Draw(port, reading, seen, way, order, seed=2, flat=False)
                self.tries.append((flat, sharp, other))

    def run(self):
        """Found, or None."""
        if not self.tries:
            return None
        found = self.within(0.6 * self.seconds, self.search)
        if not found and self.seen.uses_order:
            found = self.within(0.4 * self.seconds, self.search_with_another_rotary)
        return found

    def within(self, seconds, search):
        """What a function finds in so many seconds of one core, or None."""
        began, tries_before = time.process_time(), self.clock.tries
        self.clock.ends = began + seconds
        try:
            return search()
        except TooLong:
            self.was_cut_off = True
            return None
        finally:
            self.seconds_spent += time.process_time() - began
            self.combinations += self.clock.tries - tries_before  # not those of other searches

    def search(self):
        for mistakes in cheapest_first(self.possible(is_sharp=False), self.most):
            tries = [draws for draws in self.tries if self.is_right_where_flat(draws, mistakes)]
            if not tries:
                continue
            self.fitting.append((mistakes, tries))
            for more in cheapest_first(self.possible(is_sharp=True), 2):
                found = self.fit(mistakes + more, tries)
                if found:
                    return found

    def search_with_another_rotary(self):
        d = self.tries[0][0].w.d
        shares = [n for n in (d, d // 2, d // 4, 3 * d // 4) if n >= 2 and n % 2 == 0]
        sharp = self.possible(is_sharp=True)
        for mistakes, tries in self.fitting:
            for wrong_ones, turned, theta in itertools.product((0, 1), shares, THETAS):
                for more in sorted(combinations(sharp, wrong_ones), key=cost):
                    found = self.fit(mistakes + more, tries, turned, theta)
                    if found:
                        return found

    def is_right_where_flat(self, draws, mistakes):
        steps = changed(self.steps, mistakes)
        if steps is None:
            return False
        self.clock.tick()
        if any(mistake.needs_lambda for mistake in mistakes):
            error, _ = draws[0].fit(steps)
        else:
            error = draws[0].error(steps)
        self.flat_errors.append(error)
        return error < max(FLAT, self.seen.tolerance)

    def fit(self, mistakes, tries, turned=None, theta=None):
        """Found, if our layer with these mistakes equals the port, for two draws of its weights."""
        steps = changed(self.steps, mistakes)
        if steps is None or (theta and steps.turn in WITHOUT_THETA):
            return None
        is_to_leak = self.reading.causal and self.seen.sees_future
        if is_to_leak and not any(mistake.leaks for mistake in mistakes):
            return None
        for _, sharp, other in tries:
            self.clock.tick()
            error, w = sharp.fit(steps, turned, theta)
            if error < self.seen.tolerance:
                error, again = other.fit(steps, turned, theta)
            self.sharp_errors.append(error)
            if error < self.seen.tolerance:
                return Found(self.reading, mistakes, steps, error, sharp, w, again)
        return None

    def possible(self, is_sharp):
        """The mistakes that are possible in this port: a list of them for each step."""
        reading, seen = self.reading, self.seen
        found = {}
        for mistake in BY_CODE:
            step = mistake.step
            if mistake.is_sharp != is_sharp or mistake.only not in self.kinds():
                continue
            if reading.causal and mistake.leaks and not seen.sees_future:
                continue
            if not reading.causal and step == "maps":  # these are about a mask
                continue
            if mistake.needs_order and not seen.uses_order:
                continue
            if reading.version == 0 and (step in NOT_OF_SOFTMAX or mistake.needs_lambda):
                continue
            found.setdefault(step, []).append(mistake)
        return list(found.values())

    def kinds(self):
        """What the field `only` of a mistake may say in this port."""
        w = self.tries[0][0].w
        found = ["", f"version {self.reading.version}"]
        if w.kv < w.h:
            found.append("grouped")
        found.append("norm with weight" if self.has_gain else "norm without weight")
        return found

    def where_it_failed(self):
        """What was tried without success, and where the port and our layer part."""
        tried = f"Nothing on the list explains it, in {self.combinations} combinations."
        if self.was_cut_off:  # then we can't say that it is nothing on the list
            tried = (f"No cause was found in {self.seconds_spent:.0f} seconds, after "
                     f"{self.combinations} combinations.")
        where = "where q and k are split, turned, compared or subtracted"
        apart = min(self.sharp_errors)
        is_sharp = min(self.flat_errors) <= max(FLAT, self.seen.tolerance)
        if not is_sharp:
            where = "already where W_q = 0 makes all maps flat"
            apart = min(self.flat_errors)
        text = f"{tried} They part {where}, by {apart:.2g} of the largest output."
        if is_sharp:
            text += (" Any pairing of maps in heads is the paper's layer, but only usual ones are "
                     "tried.")
        return text


def changed(steps, mistakes):
    """The steps with mistakes, or None where two of them want the same place."""
    changes = {}
    for mistake in mistakes:
        if changes.keys() & mistake.steps.keys():
            return None
        changes |= mistake.steps
    return replace(steps, **changes)


def cheapest_first(lists, most):
    """Combinations of mistakes, at most so many of them called DIFFERS."""
    for wrong_ones in range(most + 1):
        yield from sorted(combinations(lists, wrong_ones), key=cost)


def combinations(lists, wrong_ones):
    """All ways to take at most one mistake of each list, of which so many are called DIFFERS."""
    if not lists:
        if wrong_ones == 0:
            yield ()
        return
    yield from combinations(lists[1:], wrong_ones)
    for mistake in lists[0]:
        left = wrong_ones - level(mistake)
        if left >= 0:
            for others in combinations(lists[1:], left):
                yield (mistake, *others)


def level(mistake):
    """As how many it counts. What is rare is tried later."""
    if mistake.verdict != DIFFERS:
        return 0
    return 2 if mistake.is_rare else 1


def cost(mistakes):
    return sum(COST[mistake.verdict] for mistake in mistakes)
