"""Rewards for any task: Open-R1's and DAPO's by name and weight, and functions of one's own."""
