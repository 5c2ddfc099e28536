"""Mistakes in elastic runs: who is lost, who leads, who is taken in, and what fewer ranks do."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RULE = "tests/config/test_elastic.py::test_fewer_ranks_take_the_same_samples_by_the_rule"
NODES = "tests/launch/test_elastic.py"
STILL = f"{NODES}::test_a_host_that_stands_still_for_a_moment_is_not_lost"

ELASTIC = (
    Mutant(
        "fewer replicas take fewer samples",
        "megatron/config/elastic.py",
        "gas=total // (batch.batch_size * count)",
        "gas=batch.gas",
        (RULE,),
    ),
    Mutant(
        "replicas that cannot share out a step alike are made",
        "megatron/config/elastic.py",
        "if not any(size % (batch.batch_size * count) for size in sizes)",
        "if sizes",
        (RULE,),
    ),
    Mutant(
        "as few replicas as possible",
        "megatron/config/elastic.py",
        "range(min(num_ranks, span.most) // each, 0, -1)",
        "range(1, min(num_ranks, span.most) // each + 1)",
        (RULE,),
    ),
    Mutant(
        "a layout with fewer replicas is not looked at again",
        "megatron/training/entrypoint.py",
        "        found = find_problems(fitted, used)\n",
        "        found = []\n",
        (RULE,),
    ),
    Mutant(
        "MIN may hold no replica",
        "megatron/config/elastic.py",
        "if span.fewest < each:",
        "if span.most < each:",
        ("tests/config/test_elastic.py::test_fewest_ranks_that_hold_no_replica_are_refused_at_the_first_start",),
        refuses=True,
    ),
    Mutant(
        "a node that has come ends the ranks ahead of a save",
        "megatron/training/trainer.py",
        '(REGROUP if saves and regroups else "")',
        '(REGROUP if regroups else "")',
        ("tests/training/test_stop.py::test_a_node_that_waits_is_taken_in_with_a_save_and_not_ahead_of_it",),
    ),
    Mutant(
        "a node that comes back leads a job that it does not know",
        "megatron/launch/elastic.py",
        'all((one["number"], -one["node"]) < own for one in answers.values())',
        'all(-one["node"] < own[1] for one in answers.values())',
        (f"{NODES}::test_a_node_that_comes_back_at_once_does_not_lead_a_job_that_it_does_not_know",),
        refuses=True,
    ),
    Mutant(
        "a node that is silent for a moment is lost",
        "megatron/launch/control.py",
        "if now - peer.heard_at > self._silence_s:",
        "if now - peer.heard_at > 2 * BEAT_S:",
        (STILL,),
        refuses=True,
    ),
    Mutant(
        "a node that stood still goes on by itself",
        "megatron/launch/elastic.py",
        'elif answer["leads"] and (answer["number"], -answer["node"]) > own:',
        'elif answer["leads"] and not own:',
        (STILL,),
        refuses=True,
    ),
    Mutant(
        "fewer than MIN begin",
        "megatron/launch/elastic.py",
        "has_all and len(ready) + 1 >= self.fewest",
        "has_all",
        (f"{NODES}::test_fewer_than_min_end_with_4_and_say_what_to_do",),
        refuses=True,
    ),
    Mutant(
        "a node that waits does not learn the job's name",
        "megatron/launch/control.py",
        '            self.job = welcome["job"]\n',
        "",
        (f"{NODES}::test_a_node_that_waits_goes_on_with_the_job_when_all_others_are_lost",),
    ),
    Mutant(
        "restarts are counted anew by each leader",
        "megatron/launch/control.py",
        '        self.job = message["job"]\n',
        '        self.job = message["job"] | {"restarts": 0}\n',
        (f"{NODES}::test_restarts_are_counted_over_all_leaders_and_used_up",),
        refuses=True,
    ),
    Mutant(
        "any stop with 75 starts the job again while a node waits",
        "megatron/launch/attempt.py",
        "return all(one.state == failure.REGROUP for one in self._exits)",
        "return True",
        (f"{NODES}::test_ranks_that_stop_for_another_reason_end_the_job_though_a_node_waits",),
        refuses=True,
    ),
    Mutant(
        "nodes that wait are left behind when the job ends",
        "megatron/launch/agent.py",
        "        self._node.close(self.job_code)\n",
        "",
        (f"{NODES}::test_a_job_that_ends_lets_the_nodes_that_wait_go",),
        refuses=True,
    ),
)
