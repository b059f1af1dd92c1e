"""The life of a share against a naive model: words that are lost, repeated, late; silence; ends.

Receivers here are programs: each makes attempts, each attempt says its words in order, and the way
to the owner loses, repeats and reorders them. The model keeps only lists of what arrived and when,
and works everything out anew from them; the share keeps states. They must agree after every step.
"""

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from weighlock.sharing.share import FINAL, Event, Life, State

NAMES = ("one", "two", "three")
STRANGERS = ("visitor-1", "visitor-2")
WHO = st.integers(0, 2)
ENDS = {"landed": State.LANDED, "failed": State.FAILED, "aborted": State.ABORTED}


@dataclasses.dataclass(frozen=True)
class Heard:
    """A word as it arrived."""

    at: float
    name: str
    word: str
    attempt: str
    bytes_here: int


class Model:
    """What was heard, in order; and from it, by reading all of it again, what must be so."""

    def __init__(self, names, idle_s, expires_s, now):
        self.names, self.idle_s, self.expires_s = names, idle_s, expires_s
        self.began = self.last = now
        self.heard = []
        self.lost = {}  # name → how many of its words had been heard when it was given up
        self.slept = []  # (when, seconds): so long this side was stopped until then
        self.requests = 0
        self.ended = None
        self.final = None

    def words_of(self, name):
        return [heard for heard in self.heard if heard.name == name]

    def state(self, name):
        words = self.words_of(name)
        if any(heard.word == "landed" for heard in words):
            return State.LANDED
        state, over, current = State.WAITING, set(), None
        for number, heard in enumerate(words, 1):
            if heard.attempt in over:
                pass  # late
            elif heard.word in ENDS:
                over |= {heard.attempt, current}
                current, state = None, ENDS[heard.word]
            else:
                if heard.attempt != current:
                    over.add(current)
                current, state = heard.attempt, State.STARTED
            if self.lost.get(name) == number and state is State.STARTED:
                state = State.LOST
        return state

    def counts(self, heard, before):
        """Whether a word that arrives tells something: not if its attempt is over."""
        over, current = set(), None
        for each in before:
            if each.attempt in over:
                continue
            if each.word in ENDS:
                over |= {each.attempt, current}
                current = None
            else:
                if each.attempt != current:
                    over.add(current)
                current = each.attempt
        return heard.attempt not in over

    def bytes_here(self, name):
        """What the attempt that spoke last, or landed first, says it has."""
        words = self.words_of(name)
        landed = [heard for heard in words if heard.word == "landed"]
        counted = [w for n, w in enumerate(words) if self.counts(w, words[:n])]
        return (landed[:1] or counted[-1:] or [Heard(0, name, "", "", 0)])[0].bytes_here

    def silent_since(self, name):
        """When it was last heard, sleep of this side taken off."""
        words = self.words_of(name)
        counted = [w for n, w in enumerate(words) if self.counts(w, words[:n])]
        return self.forgiven(counted[-1].at)

    def forgiven(self, since):
        for when, seconds in self.slept:
            if when >= since:
                since = min(when, since + seconds)
        return since

    def everybody(self):
        return self.names or tuple(dict.fromkeys(heard.name for heard in self.heard))

    def states(self):
        return {name: self.state(name) for name in self.everybody()}

    def end(self, reason):
        if self.ended is None:
            over = dict.fromkeys((State.WAITING, State.STARTED), State.LOST)
            self.final = {name: over.get(s, s) for name, s in self.states().items()}
            self.ended = reason

    def settle(self):
        if self.names and all(state in FINAL for state in self.states().values()):
            self.end("settled")

    def pass_time(self, now):
        if self.expires_s is not None and now >= self.began + self.expires_s:
            self.end("expired")

    def look(self, now):
        self.pass_time(now)
        if self.ended is not None or self.idle_s is None:
            return
        for name in self.everybody():
            silent = self.state(name) is State.STARTED
            if silent and now >= self.silent_since(name) + self.idle_s:
                self.lost[name] = len(self.words_of(name))
        self.settle()
        if not self.names and not self.requests:
            words = [self.last, *(heard.at for heard in self.heard)]
            if now >= self.forgiven(max(words)) + self.idle_s:
                self.end("settled")


class Shares(RuleBasedStateMachine):
    """An owner's share, receivers, and the way between them."""

    on_their_way = Bundle("on_their_way")

    @initialize(
        names=st.sampled_from([(), NAMES[:1], NAMES[:2], NAMES]),
        idle_s=st.sampled_from([None, 10, 30]),
        expires_s=st.sampled_from([None, None, 400]),
    )
    def share(self, names, idle_s, expires_s):
        self.now = 1000.0
        self.names = names
        self.life = Life(lambda: self.now, receivers=names, expires_s=expires_s, idle_s=idle_s)
        self.model = Model(names, idle_s, expires_s, self.now)
        self.attempts = dict.fromkeys(names or STRANGERS, 0)
        self.said_landed = set()
        self.landed = {}
        self.at_end = None
        self.steps = 0

    # --- receivers ---

    @rule(target=on_their_way, who=WHO, word=st.sampled_from(["started", "alive", *ENDS]))
    def says(self, who, word):
        return self.spoken(who, word)

    @rule(who=WHO, word=st.sampled_from(["started", "alive"]))
    def says_that_it_is_there_and_is_heard(self, who, word):
        self.hear(*self.spoken(who, word))

    @rule(who=st.just(0), word=st.sampled_from(sorted(ENDS)))
    def says_its_last_word_and_is_heard(self, who, word):
        self.hear(*self.spoken(who, word))

    def spoken(self, who, word):
        name = list(self.attempts)[who % len(self.attempts)]
        return name, word, f"{self.attempts[name]:x}", 100 - 10 * self.attempts[name]

    @rule(who=WHO)
    def crashes_and_comes_back(self, who):
        name = list(self.attempts)[who % len(self.attempts)]
        if self.attempts[name] < 6:
            self.attempts[name] += 1

    # --- the way ---

    @rule(said=consumes(on_their_way))
    def arrives(self, said):
        self.hear(*said)

    @rule(said=on_their_way)
    def arrives_and_will_again(self, said):
        self.hear(*said)

    @rule(said=consumes(on_their_way))
    def is_lost(self, said):
        pass

    def hear(self, name, word, attempt, bytes_here):
        self.life.report(name, Event(word), attempt, bytes_here)
        self.model.pass_time(self.now)
        if self.model.ended is None:
            self.model.heard.append(Heard(self.now, name, word, attempt, bytes_here))
            if word == "landed":
                self.said_landed.add(name)
            self.model.settle()

    # --- requests for data ---

    @rule()
    def asks_for_data(self):
        self.life.enter()
        self.model.requests += 1
        self.model.last = self.now

    @precondition(lambda self: self.model.requests)
    @rule()
    def has_its_data(self):
        self.life.leave()
        self.model.requests -= 1
        self.model.last = self.now

    # --- the owner ---

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 9.5, 10.0, 31.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def owner_looks(self):
        again = self.life.tick()
        self.model.look(self.now)
        assert again is None or again >= 0
        if self.life.ended is not None:
            assert again is None

    @rule(seconds=st.sampled_from([10.0, 30.0]))
    def owner_looks_when_something_may_be_due(self, seconds):
        self.now += seconds
        self.owner_looks()

    @rule(seconds=st.sampled_from([4.0, 15.0, 60.0]))
    def owner_was_stopped(self, seconds):
        self.now += seconds
        self.forgive(seconds)

    @rule(seconds=st.sampled_from([4.0, 15.0]), who=WHO)
    def owner_was_stopped_and_hears_before_it_knows(self, seconds, who):
        self.now += seconds
        self.hear(*self.spoken(who, "alive"))
        self.forgive(seconds)

    def forgive(self, seconds):
        self.life.forgive(seconds)
        self.model.pass_time(self.now)
        self.model.slept.append((self.now, seconds))

    @precondition(lambda self: self.model.ended is None and self.steps > 20)
    @rule(reason=st.sampled_from(["revoked", "changed"]))
    def owner_ends_it(self, reason):
        was_over = self.life.ended is not None
        assert self.life.end(reason) is not was_over
        self.model.pass_time(self.now)
        self.model.end(reason)

    # --- what must be so ---

    @invariant()
    def counts_steps(self):
        self.steps += 1

    @invariant()
    def agrees_with_the_model(self):
        self.model.pass_time(self.now)
        assert self.life.ended == self.model.ended
        expected = self.model.states() if self.model.ended is None else self.model.final
        found = {name: each.state for name, each in self.life.outcome.receivers.items()}
        assert found == expected

    @invariant()
    def ends_once_and_for_good(self):
        outcome = self.life.outcome
        if outcome.reason is None:
            assert self.at_end is None
            return
        if self.at_end is None:
            self.at_end = outcome
        assert outcome == self.at_end  # bytes, seconds and causes too
        assert all(each.state in FINAL for each in outcome.receivers.values())
        assert self.life.end("revoked") is False
        assert self.life.tick() is None
        assert self.life.remaining_s == 0

    @invariant()
    def landed_is_who_said_so(self):
        assert set(self.life.outcome.landed) == self.said_landed & set(self.model.everybody())
        assert self.life.landed == len(self.life.outcome.landed)

    @invariant()
    def settles_iff_each_is_final(self):
        outcome = self.life.outcome
        if self.names and outcome.reason in (None, "settled"):
            final = all(each.state in FINAL for each in outcome.receivers.values())
            assert final == (outcome.reason == "settled")

    @invariant()
    def numbers_make_sense(self):
        for name, each in self.life.outcome.receivers.items():
            assert each.seconds >= 0
            assert self.life.receiver(name) == each
            assert each.bytes_here == self.model.bytes_here(name)
            if each.state is State.LANDED:
                assert self.landed.setdefault(name, each) == each

    def teardown(self):
        """After a very long time, nothing is open that has a bound."""
        if hasattr(self, "life"):
            self.now += 10_000
            self.owner_looks()
            self.agrees_with_the_model()
            self.ends_once_and_for_good()


TestShares = Shares.TestCase
TestShares.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
