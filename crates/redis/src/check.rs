//! The checks before the first event: that the server is a Redis that can take events, and how durable it is.

use std::{collections::HashMap, sync::atomic::Ordering};

use airtight_core::{Code, Error, Result};
use redis::Value;

use crate::{
    client::{Client, Connection},
    encode::{Trim, script},
};

/// Connects and checks. What the server does not let us see is not checked.
pub(crate) async fn open(client: &Client) -> Result<()> {
    client.forget();
    let mut connection = client.connect().await?;
    let config = &client.config;
    // No events: does the server run scripts, and may we?
    let nothing = script(Trim::Never, std::iter::empty());
    let ran = client.ask(&mut connection, &nothing, config.timeout).await?;
    ran.map_err(|refusal| refusal.of_server(&client.address))?;
    let info = client.ask(&mut connection, &redis::cmd("INFO"), config.timeout).await?;
    match info {
        Ok(Value::BulkString(text)) => {
            let text = String::from_utf8_lossy(&text);
            let info: Info<'_> = text.lines().filter_map(|line| line.trim_end().split_once(':')).collect();
            suits(client, &info)?;
            if !client.has_warned.swap(true, Ordering::Relaxed) {
                warn(client, &mut connection, &info).await?;
            }
        }
        _ => tracing::debug!(
            address = client.address,
            "the user may not use INFO, so the server is not checked"
        ),
    }
    client.keep(connection);
    Ok(())
}

type Info<'a> = HashMap<&'a str, &'a str>;

/// What would keep every event out.
fn suits(client: &Client, info: &Info<'_>) -> Result<()> {
    let address = &client.address;
    let is = |name, value| info.get(name) == Some(&value);
    let refuse = |code, what: String| Err(Error::unavailable(code, format!("{address} {what}")));
    if let Some(version) = info.get("redis_version") {
        let oldest = if client.config.max_age.is_some() { (6, 2) } else { (5, 0) };
        if number(version) < oldest {
            let (major, minor) = oldest;
            return refuse(
                Code::SERVER_TOO_OLD,
                format!("is Redis {version}, and {major}.{minor} or later is required"),
            );
        }
    }
    if is("cluster_enabled", "1") {
        return refuse(Code::CLUSTER, "is part of a Redis Cluster, which airtight does not support".into());
    }
    if is("role", "slave") {
        let primary = info.get("master_host").zip(info.get("master_port"));
        let primary = primary.map(|(host, port)| format!(", {host}:{port}")).unwrap_or_default();
        return refuse(Code::READ_ONLY, "is a replica".into())
            .map_err(|error| error.with_remedy(format!("name the primary{primary}")));
    }
    let wanted = client.config.wait_replicas;
    let have = info.get("connected_slaves").and_then(|text| text.parse::<i64>().ok());
    match have {
        // Before anything is sent: else every try would leave another copy in the stream.
        Some(have) if have < i64::from(wanted) => Err(too_few_replicas(address, have, wanted)),
        _ => Ok(()),
    }
}

pub(crate) fn too_few_replicas(address: &str, have: i64, wanted: u32) -> Error {
    Error::unavailable(
        Code::TOO_FEW_REPLICAS,
        format!("{have} replicas of {address} have the events, and `wait_replicas` is {wanted}"),
    )
}

/// Logs once how durable delivered events are on this server.
async fn warn(client: &Client, connection: &mut Connection, info: &Info<'_>) -> Result<()> {
    let address = &client.address;
    if info.get("aof_enabled") == Some(&"0") {
        tracing::warn!(
            address,
            "`appendonly` is off: a crash of Redis loses every delivered event since its last snapshot; set `appendonly yes` and `appendfsync always`"
        );
    } else if let Some(when) =
        client.setting(connection, "appendfsync").await?.filter(|when| when != "always")
    {
        let lost = if when == "everysec" { "about a second" } else { "about the last half minute" };
        tracing::warn!(
            address,
            appendfsync = when,
            "a crash of Redis's host loses {lost} of delivered events; with `appendfsync always` it loses none"
        );
    }
    if let Some(policy) = info.get("maxmemory_policy").filter(|policy| policy.starts_with("allkeys")) {
        tracing::warn!(
            address,
            policy,
            "`maxmemory-policy` lets Redis drop whole streams when it is full; with `noeviction` events wait instead"
        );
    }
    Ok(())
}

/// Major and minor of `7.0.15`.
fn number(version: &str) -> (u32, u32) {
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}
