"""Which Mac a request goes to: prefix index, booked load, policy."""
