"""Programs to copy from; they use the public names of ``shmbuffer``, as a program of yours would.

double_dqn.py   the agent: network, learning step, transitions; no buffer, no process
cartpole.py     its collectors, its learner and the coordinator, around one shared buffer
evidence.py     signed items, and the proof that none of them was lost or torn
trial.py        a run of cartpole.py that is killed on purpose, and recovered
nodes.py        the same agent over several nodes of Ray, of which one dies and comes back
loopback.py     a Ray cluster of several nodes on this machine
"""
