"""The program that ``shmbuffer demo`` runs, to copy from.

It is not part of the library. The directory ``shmbuffer/examples`` is a link to it, so that it can
be imported as ``shmbuffer.examples`` from a clone and from an installed wheel.

double_dqn.py      the agent: network, learning step, transitions; no buffer, no process
cartpole.py        its collectors, its learner and the coordinator, around one shared buffer
crew.py            the processes of that program, started and killed by the trial
evidence.py        signed items, and the proof that none of them was lost or torn
trial.py           a run of cartpole.py that is killed on purpose, and recovered
nodes.py           the same agent over several nodes of Ray, of which one dies and comes back
loopback.py        a Ray cluster of several nodes on this machine
command.py         the command line of the demo, and its tables; nodes_command.py: with --nodes
learning_curve.py  the picture of a run
"""
