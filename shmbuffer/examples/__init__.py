"""Programs to copy from; they use the public names of ``shmbuffer``, as a program of yours would.

cartpole.py   a double DQN: its collectors, its learner, and the weights between them
evidence.py   signed items, and a check that none of them was lost or torn
"""
