"""Speed of fastattn beside other attention libraries for the CPU, every result checked before it is timed."""
