"""Does the filter keep the best, do choices flip where they must, how long does one take?"""
