"""The group that the program which started a process put it in, from variables."""
