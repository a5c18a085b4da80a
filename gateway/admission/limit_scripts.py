"""The scripts by which gateways share the limits of API keys in Redis.

Redis keeps two buckets of each API key, and for each gateway a hash of its running requests and
queued tokens by API key. The hash expires without a sign of life, so that those of a gateway that
is gone are free again. Redis measures the time of the buckets by its own clock.
"""

# Keys: the hash of this gateway, the set of gateways. Argument: how long a gateway may be silent,
# ms. Returns the number of gateways; 0 if the hash of this one has expired.
BEAT = """
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then return 0 end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_ms - ARGV[1])
redis.call('ZADD', KEYS[2], now_ms, KEYS[1])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return redis.call('ZCARD', KEYS[2])
"""

# Keys: the buckets of an API key, the hash of this gateway, the set of gateways. Arguments: the
# API key's name; its limits of requests and tokens a minute, running requests and queued tokens, 0
# for none; whether to keep to them; and what to take of each. Returns the limit that is exceeded,
# if one is, and what is left of requests and tokens. O(gateways).
TAKE = """
local name, keeps = ARGV[1], ARGV[6] == '1'
local most = {requests = tonumber(ARGV[2]), tokens = tonumber(ARGV[3])}
local most_running, most_queued = tonumber(ARGV[4]), tonumber(ARGV[5])
local take = {requests = tonumber(ARGV[7]), tokens = tonumber(ARGV[8])}
local running, queued = tonumber(ARGV[9]), tonumber(ARGV[10])
if redis.call('EXISTS', KEYS[2]) == 0 then return {'unknown', '0', '0'} end

local time = redis.call('TIME')
local now_s = time[1] + time[2] / 1000000
local kept = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'since_s')
local left = {requests = tonumber(kept[1]), tokens = tonumber(kept[2])}
local passed_s = math.max(0, now_s - (tonumber(kept[3]) or now_s))
for unit, amount in pairs(most) do
    left[unit] = math.min(amount, (left[unit] or amount) + passed_s * amount / 60)
end

local exceeded = ''
if keeps then
    local all_running, all_queued = 0, 0
    for _, gateway in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
        local counts = redis.call('HMGET', gateway, 'running:' .. name, 'queued:' .. name)
        all_running = all_running + (tonumber(counts[1]) or 0)
        all_queued = all_queued + (tonumber(counts[2]) or 0)
    end
    local function lacks(unit)
        return math.min(take[unit], most[unit]) - left[unit] > 0.000001
    end
    if most_running > 0 and all_running >= most_running then
        exceeded = 'key_concurrency'
    elseif most_queued > 0 and all_queued > 0 and all_queued + queued > most_queued then
        exceeded = 'key_queue'
    elseif most.requests > 0 and lacks('requests') then
        exceeded = 'key_requests'
    elseif most.tokens > 0 and lacks('tokens') then
        exceeded = 'key_tokens'
    end
end

if exceeded == '' then
    local full_s = 0
    for unit, amount in pairs(most) do
        if amount > 0 then
            left[unit] = math.min(amount, left[unit] - take[unit])
            redis.call('HSET', KEYS[1], unit, left[unit], 'since_s', now_s)
            full_s = math.max(full_s, (amount - left[unit]) * 60 / amount)
        end
    end
    redis.call('PEXPIRE', KEYS[1], math.ceil(full_s + 1) * 1000)
    for field, count in pairs({['running:' .. name] = running, ['queued:' .. name] = queued}) do
        if count ~= 0 and redis.call('HINCRBY', KEYS[2], field, count) <= 0 then
            redis.call('HDEL', KEYS[2], field)
        end
    end
end
return {exceeded, string.format('%.6f', left.requests), string.format('%.6f', left.tokens)}
"""
