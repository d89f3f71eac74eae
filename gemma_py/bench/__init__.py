"""How fast it is here, beside what the machine can do: measurements, and what they are measured against."""
