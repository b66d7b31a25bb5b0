"""Program of ``shmbuffer demo``, and an example to copy from.

The program is not part of the library. The directory ``shmbuffer/examples`` is a link to the
examples, so that they can be imported as ``shmbuffer.examples`` from a clone and from an installed
wheel.

double_dqn.py      the agent: network, gradient step, transitions; no buffers or processes
cartpole.py        its collectors, learner and coordinator, with one shared buffer
crew.py            starts and kills the processes of that program
evidence.py        signs items, and proves that none of them was lost or torn
trial.py           kills a run of cartpole.py on purpose, and recovers it
nodes.py           the same agent on several Ray nodes, one of which is killed and restarted
loopback.py        a Ray cluster of several nodes on this machine
command.py         command line and tables of the demo; nodes_command.py: with --nodes
learning_curve.py  the picture of a run
"""
